// The options of a program that keeps KV in a bucket, and what they mean together.
#pragma once

#include <optional>
#include <vector>

#include "base/config.h"
#include "s3/client.h"
#include "terrace/result.h"

namespace terrace::s3 {

// --s3-endpoint and the others, for the program's schema.
std::vector<config::Option> Options();

// Nothing if no bucket is named. What is not given is taken from where the AWS tools take it: AWS_ENDPOINT_URL_S3,
// AWS_ENDPOINT_URL, AWS_REGION, AWS_DEFAULT_REGION, AWS_CA_BUNDLE, AWS_PROFILE and the files of credentials.h.
Result<std::optional<ClientOptions>> ReadOptions(const config::Values& values, const Environment& environment);

}  // namespace terrace::s3
