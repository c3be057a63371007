#include "s3/options.h"

#include <algorithm>
#include <cctype>
#include <string>

#include "base/text.h"

namespace terrace::s3 {

std::vector<config::Option> Options() {
  using config::Type;
  return {
      {.name = "s3-bucket", .type = Type::kText, .help = "bucket for cached KV", .metavar = "NAME"},
      {.name = "s3-endpoint",
       .type = Type::kText,
       .help = "http[s]://host[:port], or s3://bucket.host[:port][/prefix] (default: Amazon's)",
       .metavar = "URL"},
      {.name = "s3-prefix", .type = Type::kText, .help = "use only keys below this, in the bucket", .metavar = "PATH"},
      {.name = "s3-region",
       .type = Type::kText,
       .help = "region of the bucket (default: AWS_REGION, the profile's, us-east-1)",
       .metavar = "NAME"},
      {.name = "s3-ca-file",
       .type = Type::kText,
       .help = "PEM file of the CA that signed the server's certificate (default: AWS_CA_BUNDLE, the system's)",
       .metavar = "FILE"},
      {.name = "s3-profile",
       .type = Type::kText,
       .help = "profile of ~/.aws/credentials (default: AWS_ACCESS_KEY_ID, AWS_PROFILE, web identity, `default`)",
       .metavar = "NAME"},
      {.name = "s3-access-key-id",
       .type = Type::kSecret,
       .help = "better from the environment or a profile",
       .metavar = "ID"},
      {.name = "s3-secret-access-key",
       .type = Type::kSecret,
       .help = "better from the environment or a profile",
       .metavar = "KEY"},
      {.name = "s3-session-token",
       .type = Type::kSecret,
       .help = "better from the environment or a profile",
       .metavar = "TOKEN"},
      {.name = "s3-addressing",
       .type = Type::kChoice,
       .default_value = "auto",
       .help = "bucket in the path or in the host name",
       .choices = {"auto", "path", "virtual"},
       .metavar = "STYLE"},
      {.name = "s3-disable-tls",
       .type = Type::kBool,
       .default_value = "false",
       .help = "plain http where the endpoint says neither http nor https"},
      {.name = "s3-http2", .type = Type::kBool, .default_value = "true", .help = "HTTP/2 where the server offers it"},
      {.name = "s3-sign-payload",
       .type = Type::kBool,
       .default_value = "false",
       .help = "sign what is written, too: costs half a second of a core a GB"},
      {.name = "s3-single-put-max",
       .type = Type::kBytes,
       .default_value = "128MiB",
       .help = "larger objects are written in parts",
       .metavar = "BYTES"},
      {.name = "s3-connections",
       .type = Type::kInt,
       .default_value = "32",
       .help = "calls to the bucket at once, at most",
       .metavar = "N"},
  };
}

Result<std::optional<ClientOptions>> ReadOptions(const config::Values& values, const Environment& environment) {
  const auto env = [&](const char* name) { return environment(name).value_or(""); };
  const auto first = [](std::initializer_list<std::string> texts) {
    for (const std::string& text : texts) {
      if (!Trimmed(text).empty()) return std::string(Trimmed(text));
    }
    return std::string();
  };
  const std::string& given = values.Text("s3-endpoint");
  if (values.Text("s3-bucket").empty() && !Lower(Trimmed(given)).starts_with("s3://")) {
    for (const config::Option& option : Options()) {
      if (!values.IsGiven(option.name)) continue;
      return Fail(Code::kInvalid, values.Place(option.name) + " is for a bucket, and none is named: add --s3-bucket");
    }
    return std::nullopt;
  }

  ClientOptions options;
  options.credentials.environment = environment;
  options.credentials.profile = values.Text("s3-profile");
  options.credentials.fixed = {.access_key_id = values.Text("s3-access-key-id"),
                               .secret_access_key = values.Text("s3-secret-access-key"),
                               .session_token = values.Text("s3-session-token")};
  for (const auto& [one, other] :
       {std::pair("s3-access-key-id", "s3-secret-access-key"), std::pair("s3-secret-access-key", "s3-access-key-id"),
        std::pair("s3-session-token", "s3-secret-access-key")}) {
    if (values.Text(one).empty() || !values.Text(other).empty()) continue;
    return Fail(Code::kInvalid, values.Place(one) + " is given without --" + other + ": give both, or neither");
  }
  options.region = first({values.Text("s3-region"), ConfiguredRegion(options.credentials), "us-east-1"});
  options.credentials.region = options.region;
  // It is part of a header and, without an endpoint, of a host's name.
  if (!std::all_of(options.region.begin(), options.region.end(),
                   [](unsigned char c) { return std::isalnum(c) != 0 || c == '-' || c == '_' || c == '.'; })) {
    return Fail(Code::kInvalid,
                (values.IsGiven("s3-region") ? values.Place("s3-region") : "AWS_REGION, or the profile") +
                    ": the region has more than letters, digits and hyphens in it: correct it");
  }
  options.http.ca_file = first({values.Text("s3-ca-file"), env("AWS_CA_BUNDLE")});
  options.http.http2 = values.Bool("s3-http2");
  options.sign_payload = values.Bool("s3-sign-payload");
  options.single_put_bytes_max = values.Bytes("s3-single-put-max");
  const int64_t connections = values.Int("s3-connections");
  if (connections < 1 || connections > 4096) {
    return Fail(Code::kInvalid,
                values.Place("s3-connections") + " " + std::to_string(connections) + " is not between 1 and 4096");
  }
  options.parallel_max = static_cast<size_t>(connections);
  options.http.idle_connections_max = options.parallel_max;

  const std::string& addressing = values.Text("s3-addressing");
  Result<Endpoint> endpoint =
      ParseEndpoint({.endpoint = first({given, env("AWS_ENDPOINT_URL_S3"), env("AWS_ENDPOINT_URL")}),
                     .bucket = values.Text("s3-bucket"),
                     .prefix = values.Text("s3-prefix"),
                     .region = options.region,
                     .disable_tls = values.Bool("s3-disable-tls"),
                     .addressing = addressing == "path"      ? Addressing::kPath
                                   : addressing == "virtual" ? Addressing::kVirtual
                                                             : Addressing::kAuto});
  if (!endpoint) {
    const char* variable = env("AWS_ENDPOINT_URL_S3").empty() ? "AWS_ENDPOINT_URL" : "AWS_ENDPOINT_URL_S3";
    return Fail(endpoint.error(), given.empty() && !env(variable).empty() ? variable : values.Place("s3-endpoint"));
  }
  options.endpoint = *std::move(endpoint);
  return options;
}

}  // namespace terrace::s3
