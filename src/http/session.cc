#include "http/session.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "base/assert.h"
#include "base/log.h"
#include "http/error.h"

namespace terrace::http {
namespace {

// How long a client that was refused may still send before its connection is closed over its words. Closing at once
// would make the kernel reset the connection, and the refusal could be lost.
constexpr std::chrono::milliseconds kClosingTime{2000};

const Headers& JsonHeaders() {
  static const Headers headers = {{"Content-Type", "application/json"}};
  return headers;
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------- exchange

Exchange::Exchange(std::shared_ptr<Mailbox> mailbox, Session* session, Style s)
    : style(s), mailbox_(std::move(mailbox)), session_(session) {}

void Exchange::Wake(std::unique_lock<std::mutex>& lock) {
  const bool wake = std::exchange(waiting_, false);
  lock.unlock();
  if (!wake) return;  // The session is at work and will look again.
  mailbox_->Post([self = shared_from_this()] {
    if (self->session_ != nullptr) self->session_->wake.Set();
  });
}

void Exchange::Send(int status, Headers headers, std::string body) {
  std::unique_lock lock(mutex_);
  TERRACE_ASSERT(state_ == State::kOpen);
  state_ = State::kEnded;
  on_gone_ = nullptr;
  AppendResponseHead(status, headers, {.length = body.size(), .close = style.close}, bytes_);
  if (!style.to_head) body_ = std::move(body);
  Wake(lock);
}

void Exchange::Begin(int status, Headers headers) {
  std::unique_lock lock(mutex_);
  TERRACE_ASSERT(state_ == State::kOpen);
  state_ = State::kStreaming;
  const Framing framing = style.raw_body || style.to_head ? Framing::kRaw : Framing::kChunked;
  AppendResponseHead(status, headers, {.framing = framing, .close = style.close}, bytes_);
  Wake(lock);
}

bool Exchange::Write(std::string piece) {
  std::unique_lock lock(mutex_);
  TERRACE_ASSERT(state_ == State::kStreaming);
  if (gone_ || cut_) return false;
  if (piece.empty() || style.to_head) return true;  // An empty chunk would end the answer.
  const size_t unsent = bytes_.size() + taken_bytes_;
  if (unsent > 0 && unsent + piece.size() > style.unsent_bytes_max) {
    cut_ = true;
    Wake(lock);
    return false;
  }
  if (style.raw_body) {
    bytes_ += piece;
  } else {
    AppendChunk(piece, bytes_);
  }
  Wake(lock);
  return true;
}

void Exchange::End() {
  std::unique_lock lock(mutex_);
  TERRACE_ASSERT(state_ == State::kStreaming);
  state_ = State::kEnded;
  on_gone_ = nullptr;
  if (!style.raw_body && !style.to_head) bytes_ += kLastChunk;
  Wake(lock);
}

void Exchange::OnGone(std::function<void()> fn) {
  {
    std::lock_guard lock(mutex_);
    if (state_ == State::kEnded) return;
    if (!gone_) {
      on_gone_ = std::move(fn);
      return;
    }
  }
  fn();
}

bool Exchange::gone() const {
  std::lock_guard lock(mutex_);
  return gone_ || cut_;
}

void Exchange::Dropped() {
  std::unique_lock lock(mutex_);
  if (state_ == State::kEnded || takeover_) return;
  if (state_ == State::kStreaming) {
    cut_ = true;  // The status has left; all that is left to say is that this is no whole answer.
    Wake(lock);
    return;
  }
  lock.unlock();
  Send(500, JsonHeaders(), ErrorBody("the server gave no answer", ErrorType(500), "no_answer"));
}

void Exchange::SetTakeover(Takeover takeover) {
  std::unique_lock lock(mutex_);
  TERRACE_ASSERT(state_ == State::kOpen);
  state_ = State::kEnded;
  takeover_ = std::move(takeover);
  Wake(lock);
}

Exchange::Work Exchange::Take() {
  std::lock_guard lock(mutex_);
  Work work;
  work.bytes = std::exchange(bytes_, {});
  work.body = std::exchange(body_, {});
  work.ended = state_ == State::kEnded;
  work.cut = cut_;
  work.takeover = std::exchange(takeover_, {});
  taken_bytes_ = work.bytes.size();
  waiting_ = work.bytes.empty() && !work.ended && !work.cut;
  return work;
}

void Exchange::Left() {
  std::function<void()> tell;
  {
    std::lock_guard lock(mutex_);
    gone_ = true;
    tell = std::exchange(on_gone_, nullptr);
  }
  if (tell) tell();
}

void Exchange::Detach() { session_ = nullptr; }
Reactor* Exchange::reactor() const { return session_ == nullptr ? nullptr : &session_->reactor; }

// ----------------------------------------------------------------------------------------------------------- session

Session::Session(Reactor& r, Socket socket, const SessionContext& c)
    : Activity(r),
      context(c),
      client(std::move(socket)),
      reader_({.head_bytes_max = c.options.header_bytes_max, .body_bytes_max = c.options.body_bytes_max}) {
  client.SetNoDelay();
}

Session::~Session() {
  Release();
  --reactor.counters->sessions;
  context.on_end();
}

void Session::Start(std::shared_ptr<Session> self) {
  Loop& loop = self->reactor.loop;
  Spawn(loop, Run(std::move(self)));
}

void Session::Expired() {
  timed_out = true;
  switch (phase_) {
    case Phase::kIdle:
    case Phase::kReading:
      client.Cancel();  // Only that: the client may still be told why.
      break;
    case Phase::kSending:
      ClientLeft();
      client.CloseWithReset();
      break;
    case Phase::kClosing: client.Close(); break;
    case Phase::kAnswering: Activity::Expired(); break;
  }
}

void Session::Abandon() {
  Activity::Abandon();
  ClientLeft();
  client.Close();
}

void Session::CloseIfIdle() {
  if (phase_ == Phase::kIdle) client.Close();
}

void Session::CutAnswer() {
  if (!exchange) return;
  cut = true;
  if (upstream != nullptr) upstream->Close();
  wake.Set();
}

void Session::ClientLeft() {
  if (std::exchange(client_gone, true)) return;
  if (upstream != nullptr) upstream->Close();
  if (exchange) exchange->Left();
  wake.Set();
}

Async<bool> Session::Send(std::string_view a, std::string_view b) {
  const Phase before = std::exchange(phase_, Phase::kSending);
  const bool sent = co_await WriteAll(*this, client, a, b, context.options.write_timeout);
  phase_ = before;
  Disarm();
  if (!sent) ClientLeft();
  co_return sent;
}

void Session::Watch() {
  if (watched_) return;
  watched_ = true;
  Spawn(reactor.loop, WatchClient(shared_from_this()));
}

Async<void> Session::WatchClient(std::shared_ptr<Session> self) {
  ++self->reactor.counters->watchers;
  auto [error] = co_await self->client.WaitReadable();
  --self->reactor.counters->watchers;
  // Bytes are the next request, sent ahead: they stay in the kernel.
  if (!error && self->client.PeerLeft()) self->ClientLeft();
}

Async<void> Session::Run(std::shared_ptr<Session> self) {
  Session& s = *self;
  for (bool go_on = true; go_on;) {
    go_on = co_await s.ReadRequest();
    if (go_on) go_on = co_await s.Answer();
    s.Release();
  }
  if (!s.client_gone) s.client.Discard();  // What is unread at the close would turn it into a reset.
}

bool Session::Hold(size_t body_bytes) {
  body_bytes_ += body_bytes;
  return (reactor.counters->body_bytes += body_bytes) <= context.options.bodies_bytes_max;
}

void Session::Release() { reactor.counters->body_bytes -= std::exchange(body_bytes_, 0); }

Async<bool> Session::ReadRequest() {
  reader_.Reset();
  phase_ = Phase::kIdle;
  Arm(context.options.idle_timeout);
  bool told_to_continue = false;
  for (;;) {
    const bool head_before = reader_.head_done();
    const Progress progress = reader_.Feed(in_.bytes());
    in_.Use(progress.used);
    if (head_before && !Hold(progress.used)) {
      co_await Refuse(503, "the server holds as many bytes of requests as it may; try again", "overloaded");
      co_return false;
    }
    if (progress.state == Wire::kDone) {
      Disarm();
      co_return true;
    }
    const bool room = in_.MakeRoom(context.options.header_bytes_max + 1);
    if (progress.state != Wire::kMore || !room) {
      co_await Refuse(progress.state);
      co_return false;
    }
    // A head has one term from its first byte on, whatever it dribbles; a body has to progress.
    const bool began = phase_ == Phase::kIdle && (reader_.started() || !in_.empty());
    if (began) phase_ = Phase::kReading;
    if (began || (head_before && progress.used > 0) || (!head_before && reader_.head_done())) {
      Arm(context.options.read_timeout);
    }
    if (!told_to_continue && reader_.head_done() && in_.empty() && reader_.expects_continue()) {
      told_to_continue = true;
      client.TrySend("HTTP/1.1 100 Continue\r\n\r\n", {});
    }
    if (reactor.stopping() || (phase_ == Phase::kIdle && reactor.counters->draining)) co_return false;
    auto [error, n] = co_await client.Read(in_.room(), in_.room_size());
    if (error) {
      if (timed_out && phase_ == Phase::kReading && !stopped) {
        co_await Refuse(408, "the request did not arrive in time", "request_timeout");
      }
      co_return false;
    }
    in_.Add(n);
  }
}

Async<bool> Session::Answer() {
  phase_ = Phase::kAnswering;
  if (reactor.counters->draining) {
    co_await Refuse(503, "the server is shutting down", "shutting_down");
    co_return false;
  }
  Request request = reader_.Take();
  const bool go_on = reader_.keep_alive();
  exchange = std::make_shared<Exchange>(reactor.mailbox, this,
                                        Exchange::Style{.to_head = request.method == "HEAD",
                                                        .raw_body = reader_.http_1_0(),
                                                        .close = !go_on,
                                                        .unsent_bytes_max = context.options.unsent_bytes_max});
  try {
    context.handler(std::move(request), std::make_shared<ExchangeResponder>(exchange));
  } catch (const std::exception& e) {  // Third-party code under a handler; its responder is gone, which is a 500.
    log::Error("http_handler_threw", {{"what", e.what()}});
  }
  const bool sent = co_await SendAnswer();
  if (std::exchange(watched_, false)) client.Cancel();  // Ends the watcher.
  exchange->Detach();
  exchange.reset();
  co_return sent&& go_on && !client_gone && !stopped;
}

Async<bool> Session::SendAnswer() {
  for (bool began = false;;) {
    Exchange::Work work = exchange->Take();
    if (work.takeover) {
      auto answer = work.takeover(shared_from_this());
      const bool whole = co_await std::move(answer);
      co_return whole;
    }
    if (!work.bytes.empty()) {
      began = true;
      const bool sent = co_await Send(work.bytes, work.body);
      if (!sent) co_return false;
    }
    if (work.cut) {
      ClientLeft();
      if (exchange->style.raw_body) client.CloseWithReset();  // A plain close would look like the end of the answer.
      co_return false;
    }
    if (work.ended) co_return true;
    if (!work.bytes.empty()) continue;
    Watch();
    co_await wake.Wait();
    if (client_gone || stopped) co_return false;
    if (cut) {
      exchange->Left();
      if (!began) co_await Refuse(503, "the server is shutting down", "shutting_down");
      if (began && exchange->style.raw_body) client.CloseWithReset();
      co_return false;
    }
  }
}

Async<void> Session::Refuse(Wire state) {
  const Options& options = context.options;
  if (state == Wire::kHeadTooLong) {
    const std::string message =
        "the request's head is longer than " + std::to_string(options.header_bytes_max) + " bytes";
    return Refuse(431, message, "header_too_large");
  }
  if (state == Wire::kBodyTooLong) {
    const std::string message =
        "the request's body is longer than " + std::to_string(options.body_bytes_max) + " bytes";
    return Refuse(413, message, "body_too_large");
  }
  return Refuse(400, "this is not a request that this server understands", "bad_request");
}

Async<void> Session::Refuse(int status, std::string message, std::string_view code) {
  const std::string body = ErrorBody(message, ErrorType(status), code);
  std::string head;
  Headers headers = JsonHeaders();
  if (status == 503) headers.emplace_back("Retry-After", "1");
  AppendResponseHead(status, headers, {.length = body.size(), .close = true}, head);
  const bool sent = co_await Send(head, body);
  if (!sent) co_return;
  client.CloseSending();
  phase_ = Phase::kClosing;
  Arm(kClosingTime);
  char trash[4096];
  for (;;) {
    auto [error, n] = co_await client.Read(trash, sizeof trash);
    if (error) co_return;
  }
}

}  // namespace terrace::http
