// One client connection: reads requests, hands each to the handler, sends the answer. And the Responder's other end.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "http/conn.h"
#include "http/reactor.h"
#include "http/server.h"
#include "http/wire.h"

namespace terrace::http {

class Session;

// Answers a request with a coroutine of its own instead of a Responder's calls (the proxy does). True: the answer is
// whole, the connection may go on.
using Takeover = std::function<Async<bool>(std::shared_ptr<Session>)>;

// What the handler's threads and the session's thread share for one request.
class Exchange final : public std::enable_shared_from_this<Exchange> {
 public:
  struct Style {
    bool to_head = false;
    bool raw_body = false;  // No chunks: HTTP/1.0.
    bool close = false;
    size_t unsent_bytes_max = 0;
  };
  Exchange(std::shared_ptr<Mailbox> mailbox, Session* session, Style style);

  // Any thread. As Responder.
  void Send(int status, Headers headers, std::string body);
  void Begin(int status, Headers headers);
  bool Write(std::string piece);
  void End();
  void OnGone(std::function<void()> fn);
  bool gone() const;
  void Dropped();  // The handler let go of its responder.
  void SetTakeover(Takeover takeover);

  // The session's thread.
  struct Work {
    std::string bytes, body;  // To send, in this order.
    bool ended = false;       // Nothing comes after that.
    bool cut = false;         // The answer can't be completed: close the connection.
    Takeover takeover;
  };
  // What there is to do. Nothing: `wake` of the session will be set once there is.
  Work Take();
  void Left();    // The client left: tells the handler.
  void Detach();  // The session is through with this exchange.
  Reactor* reactor() const;

  const Style style;

 private:
  enum class State { kOpen, kStreaming, kEnded };
  void Wake(std::unique_lock<std::mutex>& lock);

  const std::shared_ptr<Mailbox> mailbox_;
  Session* session_;  // Read and written on the session's thread alone.

  mutable std::mutex mutex_;  // Guards what follows.
  State state_ = State::kOpen;
  std::string bytes_, body_;
  size_t taken_bytes_ = 0;  // Given to the session and not sent yet.
  bool waiting_ = false;    // The session sleeps: wake it when something comes.
  bool gone_ = false;
  bool cut_ = false;
  Takeover takeover_;
  std::function<void()> on_gone_;
};

// What the handler holds. Dropped unanswered: a 500.
class ExchangeResponder final : public Responder {
 public:
  explicit ExchangeResponder(std::shared_ptr<Exchange> e) : exchange(std::move(e)) {}
  ~ExchangeResponder() override { exchange->Dropped(); }
  void Send(int status, Headers headers, std::string body) override {
    exchange->Send(status, std::move(headers), std::move(body));
  }
  void Begin(int status, Headers headers) override { exchange->Begin(status, std::move(headers)); }
  bool Write(std::string piece) override { return exchange->Write(std::move(piece)); }
  void End() override { exchange->End(); }
  void OnGone(std::function<void()> fn) override { exchange->OnGone(std::move(fn)); }
  bool gone() const override { return exchange->gone(); }

  const std::shared_ptr<Exchange> exchange;
};

// What all sessions of a server share. Outlives them.
struct SessionContext {
  Options options;
  Handler handler;
  std::function<void()> on_end;  // A session ended; on its thread.
};

class Session final : public Activity, public std::enable_shared_from_this<Session> {
 public:
  Session(Reactor& reactor, Socket socket, const SessionContext& context);
  ~Session() override;

  static void Start(std::shared_ptr<Session> self);

  void Expired() override;
  void Abandon() override;
  bool abandoned() const override { return stopped || client_gone || cut; }
  void CloseIfIdle();  // For a drain.
  // For its end: what is being answered is not finished, and the client is told.
  void CutAnswer();

  // For whoever answers.
  Async<bool> Send(std::string_view a, std::string_view b);  // To the client. False: it left.
  // From here to the end of the answer a leaving client is noticed: `upstream` is closed, `wake` is set.
  void Watch();
  void ClientLeft();

  const SessionContext& context;
  Conn client;
  bool client_gone = false;
  bool cut = false;                    // By CutAnswer.
  std::shared_ptr<Exchange> exchange;  // While a request is answered.

 private:
  enum class Phase { kIdle, kReading, kAnswering, kSending, kClosing };

  static Async<void> Run(std::shared_ptr<Session> self);
  static Async<void> WatchClient(std::shared_ptr<Session> self);
  Async<bool> ReadRequest();
  // Counts bytes of a body. False: all bodies together are too much.
  bool Hold(size_t body_bytes);
  void Release();  // What this session holds.
  Async<bool> Answer();
  Async<bool> SendAnswer();
  Async<void> Refuse(Wire state);
  Async<void> Refuse(int status, std::string message, std::string_view code);

  InBuffer in_;
  RequestReader reader_;
  size_t body_bytes_ = 0;  // Held of Counters::body_bytes.
  Phase phase_ = Phase::kIdle;
  bool watched_ = false;
};

}  // namespace terrace::http
