#include "bench/store/peer.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>

#include "bench/store/frames.h"

namespace terrace::bench {

Peer::Peer(const std::vector<std::string>& command) {
  signal(SIGPIPE, SIG_IGN);  // A child that died is seen by its missing answer.
  int in[2], out[2];
  Check(pipe2(in, O_CLOEXEC) == 0 && pipe2(out, O_CLOEXEC) == 0, "pipe");
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, in[0], STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
  std::vector<char*> argv;
  for (const std::string& word : command) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  Check(posix_spawn(&pid_, argv[0], &actions, nullptr, argv.data(), environ) == 0, "starting " + command[0]);
  posix_spawn_file_actions_destroy(&actions);
  close(in[0]);
  close(out[1]);
  requests_ = fdopen(in[1], "w");
  answers_ = fdopen(out[0], "r");
}

Peer::~Peer() {
  fclose(requests_);
  fclose(answers_);
  waitpid(pid_, nullptr, 0);
}

nlohmann::json Peer::Ask(const nlohmann::json& request) {
  const std::string text = request.dump() + "\n";
  std::fputs(text.c_str(), requests_);
  std::fflush(requests_);
  char* line = nullptr;
  size_t size = 0;
  const bool answered = getline(&line, &size, answers_) > 0;
  const std::string answer = answered ? line : "";
  free(line);
  nlohmann::json parsed = nlohmann::json::parse(answer, nullptr, false);
  Check(parsed.is_object(), "the peer's " + text);
  return parsed;
}

}  // namespace terrace::bench
