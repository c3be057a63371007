// A process of its own that runs one chat template. The template comes with the model's file and may loop for ever,
// take all memory or recurse until the stack ends, and the engine that runs it has no bounds: here the kernel sets
// them, and what ends is the worker.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "terrace/result.h"

namespace terrace {

// What the worker's program runs: `terrace template-worker`, with a socket as standard input. No verb for people.
int RunTemplateWorker();

namespace engine {

struct TemplateBounds {
  // Of one rendering, and of reading the template. A prompt of a million tokens, some 5 MiB, takes about 0.2 s.
  std::chrono::seconds processor{2};
  // A worker that gets no processor, or that somebody stopped, is not waited for longer.
  std::chrono::seconds wait{60};
  // Address space. A body of 64 MiB, which is the largest that the server takes, takes about ten times as much.
  uint64_t memory_bytes = 2ull << 30;
  // The rendered text.
  uint64_t text_bytes = 128ull << 20;
};

// Used by one thread at a time.
class TemplateWorker {
 public:
  // `command` runs RunTemplateWorker. Fails with kInvalid if the template can't be read, with kUnavailable if there is
  // no process to be had, and otherwise as Render.
  static Result<std::unique_ptr<TemplateWorker>> Start(const std::vector<std::string>& command,
                                                       const std::string& source, const TemplateBounds& bounds);
  TemplateWorker(const TemplateWorker&) = delete;
  TemplateWorker& operator=(const TemplateWorker&) = delete;
  ~TemplateWorker();  // Ends the process.

  // kInvalid: the template refuses these variables, and says why in one line. kTimeout: it passed the bound of
  // processor time. kFull: another bound, maybe with what earlier calls left. kUnavailable: the process is not
  // scheduled. kInternal: somebody ended it. After all but the first this worker is of no use.
  Result<std::string> Render(std::string_view variables);

 private:
  TemplateWorker(int socket, int pid, const TemplateBounds& bounds) : socket_(socket), pid_(pid), bounds_(bounds) {}
  Result<std::string> Answer(std::chrono::steady_clock::time_point deadline);
  tl::unexpected<Error> Ended();

  const int socket_;
  int pid_;  // -1: ended, and waited for.
  const TemplateBounds bounds_;
};

}  // namespace engine
}  // namespace terrace
