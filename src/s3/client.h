// An S3 client: signs, sends, tries again, slows down when asked to, doubles late reads, follows a bucket to its
// region.
//
//   A call is tried `attempts_max` times at most, with a jittered and growing pause, while its deadline allows; only
//   what is transient is tried again. Refused credentials are looked for again once. The number of calls at once halves
//   when the server asks for less and grows back one by one. A 200 with an error document is a failure; so is a body
//   with another length than said, of which no more than that is taken. A call that brings no deadline gets one.
//
// Bodies go out unsigned (UNSIGNED-PAYLOAD) unless asked: signing costs 0.5 s of a core a GB, and a frame proves
// itself. They are sent as they are: no aws-chunked, no trailing checksums.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/clock.h"
#include "io/http_client.h"
#include "s3/credentials.h"
#include "s3/object_store.h"
#include "terrace/metrics.h"
#include "terrace/result.h"

namespace terrace::s3 {

struct ClientOptions {
  Endpoint endpoint;
  std::string region = "us-east-1";
  CredentialsOptions credentials;
  HttpClient::Options http{.thread_name = "terrace-s3"};
  bool sign_payload = false;
  size_t parallel_max = 32;
  int attempts_max = 4;
  int redirects_max = 2;  // To another region or host of the service, a call.
  std::chrono::milliseconds backoff{50};
  std::chrono::milliseconds backoff_max{2000};
  bool hedge = true;
  uint64_t single_put_bytes_max = 128ull << 20;  // Larger bodies go in parts.
  uint64_t part_bytes = 32ull << 20;
  size_t parts_parallel_max = 4;
  std::chrono::milliseconds put_timeout{60000};  // Of calls that bring no deadline.
};

// `clock` and `metrics` outlive it.
std::unique_ptr<ObjectStore> OpenClient(const ClientOptions& options, const Clock& clock, Metrics& metrics);

}  // namespace terrace::s3
