#include "http/proxy.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "base/assert.h"
#include "http/conn.h"
#include "http/error.h"
#include "http/reactor.h"
#include "http/session.h"
#include "http/upstream.h"
#include "http/wire.h"

namespace terrace::http {
namespace {

constexpr std::string_view kShuttingDown = "the server is shutting down";
constexpr size_t kInBytesMax = 256 << 10;  // Of a head or chunk line of a backend that is not whole yet.

// One request on its way. Shared by the coroutine that answers it and nobody else.
struct Forwarding {
  ForwardRequest what;
  std::unique_ptr<Route> route;
  ProxyOptions options;
  bool died = false;  // It was sent, and the connection ended without a byte. Once is enough.
};

struct Attempt {
  Ended ended = Ended::kUnreachable;
  int status = 0;
  std::string why;
  bool began = false;        // The client has got something.
  bool kept = false;         // Over a connection that the backend had kept open.
  bool keep_client = false;  // The client has a whole message: its connection may go on.
};

struct ReadOutcome {
  Wire state = Wire::kMore;
  std::string why;  // With kBad.
};

Ended WhyAbandoned(const Session& session) {
  return session.stopped || session.cut ? Ended::kStopped : Ended::kClientLeft;
}

// One read at most: feeds the reader what is there, else what the connection brings. Appends to `out`.
Async<ReadOutcome> ReadSome(Activity& activity, Upstream& upstream, std::string& out) {
  ReadOutcome outcome;
  for (bool have_read = false;; have_read = true) {
    if (!upstream.in.empty()) {
      const Progress progress = upstream.reader.Feed(upstream.in.bytes(), out);
      upstream.in.Use(progress.used);
      outcome.state = progress.state;
      if (progress.state == Wire::kBad) outcome.why = "it did not answer in HTTP/1.1";
      if (progress.state != Wire::kMore || progress.used > 0) co_return outcome;
    }
    if (have_read) co_return outcome;
    if (!upstream.in.MakeRoom(kInBytesMax)) {
      outcome = {Wire::kBad, "it sent a line without end"};
      co_return outcome;
    }
    auto [error, n] = co_await upstream.conn.Read(upstream.in.room(), upstream.in.room_size());
    if (error) {
      outcome.state = error == net::error::eof ? upstream.reader.Eof(out) : Wire::kBad;
      if (outcome.state == Wire::kBad) {
        outcome.why = activity.timed_out         ? "it sent nothing in time"
                      : error == net::error::eof ? "it closed the connection"
                                                 : error.message();
      }
      co_return outcome;
    }
    upstream.in.Add(n);
  }
}

// Passes the answer on as it comes.
Async<Attempt> RelayAnswer(Session& session, Upstream& upstream, const ProxyOptions& options) {
  Attempt attempt;
  std::string out;
  session.Arm(options.first_byte_timeout);
  for (;;) {
    if (attempt.began) session.Arm(options.idle_timeout);
    ReadOutcome outcome = co_await ReadSome(session, upstream, out);
    const bool timed_out = session.timed_out;
    if (session.abandoned()) {
      attempt.ended = WhyAbandoned(session);
      co_return attempt;
    }
    if (upstream.reader.head_done()) attempt.status = upstream.reader.status();
    if (upstream.reader.head_done() && !out.empty()) {
      attempt.began = true;
      const bool sent = co_await session.Send(out, {});
      out.clear();
      if (!sent) {
        attempt.ended = WhyAbandoned(session);
        co_return attempt;
      }
    }
    if (outcome.state == Wire::kDone) {
      attempt.ended = Ended::kAnswered;
      attempt.keep_client = upstream.reader.cut_shows();
      co_return attempt;
    }
    if (outcome.state == Wire::kMore) continue;

    attempt.why = std::move(outcome.why);
    attempt.ended = attempt.began               ? Ended::kCut
                    : timed_out                 ? Ended::kTimedOut
                    : upstream.reader.started() ? Ended::kBadAnswer
                                                : Ended::kDied;
    co_return attempt;
  }
}

// Ends an answer that broke off, in whatever way its reader can see.
Async<bool> EndBrokenAnswer(Session& session, Upstream& upstream, const std::string& error) {
  std::string out;
  if (upstream.reader.EndWithEvent(error, out)) {
    const bool sent = co_await session.Send(out, {});
    co_return sent&& upstream.reader.cut_shows();
  }
  if (!upstream.reader.cut_shows()) session.client.CloseWithReset();  // Else it would look like the end.
  co_return false;
}

// One backend: over a connection that it kept open if there is one, and no other has died on this request.
Async<Attempt> TryBackend(Session& session, Forwarding& forwarding, std::shared_ptr<Backend> backend) {
  const Backend::InFlight in_flight(*backend);
  const ForwardRequest& what = forwarding.what;
  std::string head;
  AppendRequestHead(what.request, backend->authority(), what.set_in_request, head);

  Attempt attempt;
  if (session.abandoned()) {
    attempt.ended = WhyAbandoned(session);
    co_return attempt;
  }
  std::unique_ptr<Upstream> upstream = forwarding.died ? nullptr : session.reactor.pool->Take(*backend);
  const bool kept = upstream != nullptr;
  if (!kept) {
    Dialled dialled = co_await Dial(session, backend, forwarding.options.connect_timeout);
    upstream = std::move(dialled.upstream);
    if (!upstream) {
      attempt.ended = session.abandoned() ? WhyAbandoned(session) : Ended::kUnreachable;
      attempt.why = std::move(dialled.why);
      co_return attempt;
    }
  }
  session.upstream = &upstream->conn;
  upstream->reader.Reset({.to_head = session.exchange->style.to_head,
                          .raw_body = session.exchange->style.raw_body,
                          .close = session.exchange->style.close,
                          .set = what.set_in_answer,
                          .last_event = what.last_event});
  // Whether all of it could be sent does not matter: a backend may answer (413, 401) and close before it read it.
  session.timed_out = false;
  (void)co_await WriteAll(session, upstream->conn, head, what.request.body, forwarding.options.send_timeout);
  if (session.timed_out) {
    attempt = {.ended = Ended::kTimedOut, .why = "it did not take the request in time"};
  } else {
    attempt = co_await RelayAnswer(session, *upstream, forwarding.options);
  }
  attempt.kept = kept;
  session.upstream = nullptr;
  session.Disarm();
  std::string error;
  if (attempt.ended == Ended::kCut) {
    error = ErrorBody("the answer of " + backend->authority() + " broke off: " + attempt.why, ErrorType(502),
                      "upstream_broke_off");
  } else if (attempt.began && session.cut && !session.stopped && !session.client_gone) {
    error = ErrorBody(std::string(kShuttingDown), ErrorType(503), "shutting_down");
  }
  if (!error.empty()) attempt.keep_client = co_await EndBrokenAnswer(session, *upstream, error);
  const bool whole = attempt.ended == Ended::kAnswered && upstream->in.empty() && upstream->reader.keep_alive();
  if (whole && !session.reactor.stopping()) session.reactor.pool->Put(std::move(backend), std::move(upstream));
  co_return attempt;
}

// What the client is told when no attempt gave it an answer.
struct Failure {
  int status = 503;
  std::string_view code = "no_backend";
  std::string message = "no backend is there for this request";
};

Failure Describe(const Attempt& attempt, const Backend& backend, size_t attempts) {
  const std::string& who = backend.authority();
  const std::string tried = attempts > 1 ? " (the last of " + std::to_string(attempts) + " tried)" : "";
  switch (attempt.ended) {
    case Ended::kTimedOut: return {504, "upstream_timeout", "backend " + who + " did not answer in time" + tried};
    case Ended::kUnreachable:
      return {503, "upstream_unreachable", "backend " + who + " can't be reached: " + attempt.why + tried};
    default: return {502, "upstream_failed", "backend " + who + " gave no answer: " + attempt.why + tried};
  }
}

Async<bool> AnswerByForwarding(std::shared_ptr<Session> session, std::shared_ptr<Forwarding> forwarding) {
  Session& s = *session;
  s.Watch();
  Failure failure;
  std::shared_ptr<Backend> backend = forwarding->route->Next();
  std::shared_ptr<Backend> again;  // It had closed a kept connection, which tells nothing of it: the last resort.
  for (size_t backends = 1; backend;) {
    Attempt attempt = co_await TryBackend(s, *forwarding, backend);
    forwarding->route->Report(*backend, attempt.ended, attempt.status, attempt.why);
    const bool answered = attempt.ended == Ended::kAnswered || attempt.ended == Ended::kCut;
    if (answered || attempt.began || s.stopped || s.client_gone) co_return attempt.keep_client;
    if (s.cut) {
      failure = {503, "shutting_down", std::string(kShuttingDown)};
      break;
    }
    failure = Describe(attempt, *backend, backends);
    const bool died = attempt.ended == Ended::kDied;
    const bool go_on = died ? !std::exchange(forwarding->died, true) : attempt.ended == Ended::kUnreachable;
    if (!go_on) break;
    if (died && attempt.kept) again = backend;
    backend = backends < forwarding->options.attempts_max ? forwarding->route->Next() : nullptr;
    if (backend) {
      ++backends;
    } else {
      backend = std::exchange(again, nullptr);
    }
  }
  const std::string body = ErrorBody(failure.message, ErrorType(failure.status), failure.code);
  Headers headers = forwarding->what.set_in_answer;
  headers.emplace_back("Content-Type", "application/json");
  if (failure.status == 503) headers.emplace_back("Retry-After", "1");
  std::string head;
  AppendResponseHead(failure.status, headers, {.length = body.size(), .close = s.exchange->style.close}, head);
  const bool sent = co_await s.Send(head, s.exchange->style.to_head ? std::string_view() : body);
  co_return sent;
}

Exchange& ExchangeOf(Responder& responder) {
  auto* own = dynamic_cast<ExchangeResponder*>(&responder);
  TERRACE_ASSERT(own != nullptr);  // Not the responder of a Server.
  return *own->exchange;
}

// ------------------------------------------------------------------------------------------------------------- fetch

struct Fetching {
  Request request;
  FetchOptions options;
  std::vector<FetchResult> results;
  size_t open = 0;
  std::function<void(std::vector<FetchResult>)> done;
};

Async<FetchResult> FetchOne(Activity& call, Fetching& fetching, std::shared_ptr<Backend> backend) {
  FetchResult result;
  const SteadyTime until = std::chrono::steady_clock::now() + fetching.options.timeout;
  std::string head;
  AppendRequestHead(fetching.request, backend->authority(), {}, head);
  std::unique_ptr<Upstream> upstream = call.reactor.pool->Take(*backend);
  bool reused = upstream != nullptr;
  for (;; reused = false) {
    if (!reused) {
      Dialled dialled = co_await Dial(call, backend, fetching.options.timeout);
      upstream = std::move(dialled.upstream);
      if (!upstream) {
        result.body = std::move(dialled.why);
        co_return result;
      }
    }
    call.upstream = &upstream->conn;
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
    upstream->reader.Reset({.to_head = fetching.request.method == "HEAD", .body_only = true});
    (void)co_await WriteAll(call, upstream->conn, head, fetching.request.body, left);
    call.Arm(left);
    std::string body;
    ReadOutcome outcome;
    while (outcome.state == Wire::kMore && body.size() <= fetching.options.body_bytes_max) {
      outcome = co_await ReadSome(call, *upstream, body);
    }
    call.Disarm();
    call.upstream = nullptr;
    if (outcome.state == Wire::kDone) {
      result.status = upstream->reader.status();
      result.content_type = upstream->reader.content_type();
      result.body = std::move(body);
      const bool whole = upstream->in.empty() && upstream->reader.keep_alive() && !call.reactor.stopping();
      if (whole) call.reactor.pool->Put(std::move(backend), std::move(upstream));
      co_return result;
    }
    const bool stale = reused && outcome.state == Wire::kBad && !upstream->reader.started() && !call.timed_out;
    if (!stale || call.abandoned()) {
      result.body = outcome.state == Wire::kMore ? "its answer is too long" : std::move(outcome.why);
      co_return result;
    }
  }
}

Async<void> RunFetch(std::shared_ptr<Activity> call, std::shared_ptr<Fetching> fetching,
                     std::shared_ptr<Backend> backend, size_t index) {
  FetchResult result = co_await FetchOne(*call, *fetching, std::move(backend));
  fetching->results[index] = std::move(result);
  if (--fetching->open == 0) fetching->done(std::move(fetching->results));
}

}  // namespace

void Forward(std::shared_ptr<Responder> responder, ForwardRequest request, std::unique_ptr<Route> route,
             const ProxyOptions& options) {
  auto forwarding = std::make_shared<Forwarding>(Forwarding{std::move(request), std::move(route), options});
  ExchangeOf(*responder).SetTakeover([forwarding = std::move(forwarding)](std::shared_ptr<Session> session) {
    return AnswerByForwarding(std::move(session), forwarding);
  });
}

void Fetch(Responder& responder, const Request& request, const std::vector<std::shared_ptr<Backend>>& backends,
           const FetchOptions& options, std::function<void(std::vector<FetchResult>)> done) {
  Reactor* reactor = ExchangeOf(responder).reactor();
  TERRACE_ASSERT(reactor != nullptr && !backends.empty());
  auto fetching = std::make_shared<Fetching>(
      Fetching{request, options, std::vector<FetchResult>(backends.size()), backends.size(), std::move(done)});
  for (size_t i = 0; i < backends.size(); ++i) {
    Spawn(reactor->loop, RunFetch(std::make_shared<Activity>(*reactor), fetching, backends[i], i));
  }
}

void Fetch(Server& server, const Request& request, std::shared_ptr<Backend> backend, const FetchOptions& options,
           std::function<void(FetchResult)> done) {
  server.Post([request, backend = std::move(backend), options, done = std::move(done)](Reactor& reactor) {
    auto fetching = std::make_shared<Fetching>(
        Fetching{request, options, std::vector<FetchResult>(1), 1, [done, &reactor](std::vector<FetchResult> results) {
                   if (!reactor.stopping()) done(std::move(results[0]));
                 }});
    Spawn(reactor.loop, RunFetch(std::make_shared<Activity>(reactor), std::move(fetching), backend, 0));
  });
}

}  // namespace terrace::http
