#include "engine/template_worker.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <new>
#include <optional>
#include <utility>

#include "engine/jinja.h"

namespace terrace {
namespace {

using engine::JinjaTemplate;
using engine::TemplateBounds;
using std::chrono::steady_clock;

constexpr int kOutOfMemory = 41;  // The worker's exit code. Any that nothing else uses.

// What crosses the socket, both ways: how many bytes, of what kind, and the bytes. Both ends are the same program.
enum class Kind : uint64_t { kBounds, kTemplate, kVariables, kText, kRefusal };
struct Head {
  Kind kind;
  uint64_t bytes;
};

// `size` bytes in or out, until the deadline. `move` is recv or send on a socket that does not block.
template <class Move>
bool MoveAll(int socket, short direction, size_t size, steady_clock::time_point deadline, Move move) {
  for (size_t done = 0; done < size;) {
    const ssize_t moved = move(done);
    if (moved > 0) {
      done += static_cast<size_t>(moved);
    } else if (moved < 0 && (errno == EAGAIN || errno == EINTR)) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - steady_clock::now()).count();
      pollfd waiting{.fd = socket, .events = direction, .revents = 0};
      if (left <= 0) return errno = ETIMEDOUT, false;
      poll(&waiting, 1, static_cast<int>(std::min<int64_t>(left, 60'000)));
    } else {
      return errno = ECONNRESET, false;
    }
  }
  return true;
}

bool Receive(int socket, void* into, size_t size, steady_clock::time_point deadline) {
  return MoveAll(socket, POLLIN, size, deadline,
                 [&](size_t done) { return recv(socket, static_cast<char*>(into) + done, size - done, MSG_DONTWAIT); });
}

bool Send(int socket, Kind kind, std::string_view bytes, steady_clock::time_point deadline) {
  const Head head{.kind = kind, .bytes = bytes.size()};
  std::string all(sizeof head, '\0');
  std::memcpy(all.data(), &head, sizeof head);
  all += bytes;
  return MoveAll(socket, POLLOUT, all.size(), deadline, [&](size_t done) {
    return send(socket, all.data() + done, all.size() - done, MSG_DONTWAIT | MSG_NOSIGNAL);
  });
}

void Limit(__rlimit_resource resource, uint64_t value) {
  rlimit limit{};
  getrlimit(resource, &limit);
  limit.rlim_cur = std::min<rlim_t>(value, limit.rlim_max);
  setrlimit(resource, &limit);
}

// What the worker does next must end within the bound: past it the kernel sends SIGXCPU, which ends the process.
void LimitProcessor(const TemplateBounds& bounds) {
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  const int64_t so_far = used.ru_utime.tv_sec + used.ru_stime.tv_sec + 1;
  Limit(RLIMIT_CPU, static_cast<uint64_t>(so_far + bounds.processor.count()));
}

}  // namespace

int RunTemplateWorker() {
  // Whoever started the server may stop its whole group: the server finishes its requests, and then closes the socket.
  signal(SIGINT, SIG_IGN);
  signal(SIGTERM, SIG_IGN);
  std::set_new_handler([] { _exit(kOutOfMemory); });
  Limit(RLIMIT_CORE, 0);

  constexpr auto kForever = steady_clock::time_point::max();
  TemplateBounds bounds;
  std::unique_ptr<JinjaTemplate> jinja;
  for (Head head{}; Receive(STDIN_FILENO, &head, sizeof head, kForever);) {
    LimitProcessor(bounds);
    std::string bytes(head.bytes, '\0');
    if (!Receive(STDIN_FILENO, bytes.data(), bytes.size(), kForever)) break;
    Result<std::string> answer{""};
    if (head.kind == Kind::kBounds) {
      std::memcpy(&bounds, bytes.data(), sizeof bounds);
      Limit(RLIMIT_AS, bounds.memory_bytes);
      continue;
    }
    if (head.kind == Kind::kTemplate) {
      auto parsed = JinjaTemplate::Parse(bytes);
      if (!parsed) {
        answer = tl::unexpected(parsed.error());
      } else {
        jinja = *std::move(parsed);
      }
    } else {
      answer = jinja->Render(bytes);
    }
    const Kind kind = answer ? Kind::kText : Kind::kRefusal;
    if (!Send(STDIN_FILENO, kind, answer ? *answer : answer.error().what, kForever)) break;
  }
  return 0;
}

namespace engine {

Result<std::unique_ptr<TemplateWorker>> TemplateWorker::Start(const std::vector<std::string>& command,
                                                              const std::string& source, const TemplateBounds& bounds) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    return Fail(Code::kUnavailable, std::string("no socket for a template worker: ") + std::strerror(errno), errno);
  }
  // The child gets its end, and nothing else that is open here: a connection that lived on in it would not close.
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_adddup2(&files, ends[1], STDIN_FILENO);
  posix_spawn_file_actions_addopen(&files, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
  posix_spawn_file_actions_addopen(&files, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  posix_spawn_file_actions_addclosefrom_np(&files, STDERR_FILENO + 1);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none;
  sigemptyset(&none);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSID);
  std::vector<std::string> words = command;
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  pid_t pid = -1;
  const int failed = posix_spawn(&pid, argv[0], &files, &attributes, argv.data(), environ);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&files);
  close(ends[1]);
  if (failed != 0) {
    close(ends[0]);
    return Fail(Code::kUnavailable, std::string("no process for a template worker: ") + std::strerror(failed), failed);
  }
  std::unique_ptr<TemplateWorker> worker(new TemplateWorker(ends[0], pid, bounds));
  const std::string_view raw(reinterpret_cast<const char*>(&bounds), sizeof bounds);
  const auto deadline = steady_clock::now() + bounds.wait;
  if (!Send(worker->socket_, Kind::kBounds, raw, deadline) ||
      !Send(worker->socket_, Kind::kTemplate, source, deadline)) {
    return worker->Ended();
  }
  const Result<std::string> read = worker->Answer(deadline);
  if (!read) return tl::unexpected(read.error());
  return worker;
}

TemplateWorker::~TemplateWorker() {
  close(socket_);
  if (pid_ < 0) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

Result<std::string> TemplateWorker::Render(std::string_view variables) {
  const auto deadline = steady_clock::now() + bounds_.wait;
  if (!Send(socket_, Kind::kVariables, variables, deadline)) return Ended();
  return Answer(deadline);
}

Result<std::string> TemplateWorker::Answer(steady_clock::time_point deadline) {
  Head head{};
  if (!Receive(socket_, &head, sizeof head, deadline)) return Ended();
  if (head.bytes > bounds_.text_bytes) {
    return Fail(Code::kFull, "it makes more than " + std::to_string(bounds_.text_bytes >> 20) + " MiB of text");
  }
  std::string bytes(head.bytes, '\0');
  if (!Receive(socket_, bytes.data(), bytes.size(), deadline)) return Ended();
  if (head.kind == Kind::kRefusal) return Fail(Code::kInvalid, std::move(bytes));
  return bytes;
}

// Why there is no answer. errno says whether the worker is slow or gone.
tl::unexpected<Error> TemplateWorker::Ended() {
  if (errno == ETIMEDOUT) {
    return Fail(Code::kUnavailable, "its process gave no answer within " + std::to_string(bounds_.wait.count()) + " s");
  }
  // The socket is closed, so the process is about to end, or to be made to.
  int status = 0;
  kill(pid_, SIGKILL);
  waitpid(std::exchange(pid_, -1), &status, 0);
  if (WIFEXITED(status) && WEXITSTATUS(status) == kOutOfMemory) {
    return Fail(Code::kFull, "it takes more than " + std::to_string(bounds_.memory_bytes >> 20) + " MiB of memory");
  }
  if (!WIFSIGNALED(status)) return Fail(Code::kInternal, "its process ended by itself");
  switch (WTERMSIG(status)) {
    case SIGXCPU:
      return Fail(Code::kTimeout,
                  "it takes more than " + std::to_string(bounds_.processor.count()) + " s of processor time");
    case SIGSEGV:
    case SIGBUS:
    case SIGABRT: return Fail(Code::kFull, "it calls itself or nests without end");
    default: return Fail(Code::kInternal, "its process was ended by signal " + std::to_string(WTERMSIG(status)));
  }
}

}  // namespace engine
}  // namespace terrace
