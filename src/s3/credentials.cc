#include "s3/credentials.h"

#include <algorithm>
#include <cctype>
#include <fstream>
#include <map>
#include <sstream>
#include <utility>

#include "base/log.h"
#include "base/text.h"
#include "s3/endpoint.h"
#include "s3/failure.h"
#include "s3/xml.h"

namespace terrace::s3 {
namespace {

constexpr size_t kFileBytesMax = 1 << 20;
// A role is renewed so long before it ends; until then the old one serves.
constexpr int64_t kRenewSeconds = 300;
constexpr std::chrono::seconds kStsTimeout{10};
// Of a source that gave nothing new: refusals come in crowds.
constexpr std::chrono::seconds kLookAgain{1};

using Section = std::map<std::string, std::string>;

std::string Trim(std::string_view text) {
  const size_t begin = text.find_first_not_of(" \t\r\n");
  if (begin == std::string_view::npos) return "";
  return std::string(text.substr(begin, text.find_last_not_of(" \t\r\n") - begin + 1));
}

std::optional<std::string> ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  std::string text(kFileBytesMax, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(file.gcount()));
  return text;
}

// [title] of the format that the AWS tools write.
std::optional<Section> ReadSection(const std::string& text, const std::string& title) {
  std::optional<Section> section;
  bool inside = false;
  std::istringstream lines(text);
  for (std::string raw; std::getline(lines, raw);) {
    const std::string line = Trim(raw);
    if (line.empty() || line[0] == '#' || line[0] == ';') continue;
    if (line[0] == '[') {
      inside = Trim(line.substr(1, line.find(']') - 1)) == title;
      if (inside && !section) section.emplace();
    } else if (const size_t equals = line.find('='); inside && equals != std::string::npos) {
      section->emplace(Lower(Trim(line.substr(0, equals))), Trim(line.substr(equals + 1)));
    }
  }
  return section;
}

struct Profile {
  Section values;
  std::string path;  // Where it was found; "": nowhere.
};

Profile ReadProfile(const CredentialsOptions& options, const std::string& name) {
  const auto env = [&](const char* variable) { return options.environment(variable).value_or(""); };
  const std::string home = env("HOME");
  const std::string shared = env("AWS_SHARED_CREDENTIALS_FILE");
  const std::string config = env("AWS_CONFIG_FILE");
  const std::pair<std::string, std::string> places[] = {
      {shared.empty() ? home + "/.aws/credentials" : shared, name},
      {config.empty() ? home + "/.aws/config" : config, name == "default" ? name : "profile " + name},
  };
  Profile profile;
  for (const auto& [path, title] : places) {
    const std::optional<std::string> text = ReadFile(path);
    if (!text) continue;
    const std::optional<Section> section = ReadSection(*text, title);
    if (!section) continue;
    if (profile.path.empty()) profile.path = path;
    profile.values.insert(section->begin(), section->end());  // The credentials file wins.
  }
  return profile;
}

std::string ProfileName(const CredentialsOptions& options) {
  if (!options.profile.empty()) return options.profile;
  const std::string name = options.environment("AWS_PROFILE").value_or("");
  return name.empty() ? "default" : name;
}

}  // namespace

std::string ConfiguredRegion(const CredentialsOptions& options) {
  for (const char* variable : {"AWS_REGION", "AWS_DEFAULT_REGION"}) {
    const std::string region = options.environment(variable).value_or("");
    if (!region.empty()) return region;
  }
  Profile profile = ReadProfile(options, ProfileName(options));
  return profile.values["region"];
}

CredentialsChain::CredentialsChain(CredentialsOptions options, HttpClient& http, const Clock& clock, Metrics& metrics)
    : options_(std::move(options)),
      http_(http),
      clock_(clock),
      reloads_(metrics.GetCounter("terrace_s3_credential_reloads_total",
                                  "Times that credentials were looked for again after a refusal.")) {}

// What is read from a file or pasted often ends with a line break.
std::string CredentialsChain::Env(const char* name) const { return Trim(options_.environment(name).value_or("")); }

int64_t CredentialsChain::NowSeconds() const { return static_cast<int64_t>(clock_.WallNs() / 1'000'000'000); }

Result<CredentialsChain::Found> CredentialsChain::FindInProfile(const std::string& name, bool named) const {
  Profile profile = ReadProfile(options_, name);
  if (profile.path.empty()) {
    if (named) return Fail(Code::kDenied, "profile \"" + name + "\" is in no credentials file");
    return Fail(Code::kDenied, "no credentials were found");
  }
  Found found{.source = "profile " + name + " of " + profile.path, .may_change = true};
  Section& values = profile.values;
  if (!values["aws_access_key_id"].empty() && !values["aws_secret_access_key"].empty()) {
    found.credentials = {values["aws_access_key_id"], values["aws_secret_access_key"], values["aws_session_token"]};
  } else if (!values["web_identity_token_file"].empty() && !values["role_arn"].empty()) {
    found.web_identity = {values["web_identity_token_file"], values["role_arn"], values["role_session_name"]};
  } else {
    return Fail(Code::kDenied, "profile \"" + name + "\" of " + profile.path +
                                   " has neither keys nor a web identity (other kinds are not supported)");
  }
  return found;
}

Result<CredentialsChain::Found> CredentialsChain::Find() const {
  if (!options_.fixed.access_key_id.empty()) return Found{.credentials = options_.fixed, .source = "configuration"};
  if (!options_.profile.empty()) return FindInProfile(options_.profile, /*named=*/true);
  if (!Env("AWS_ACCESS_KEY_ID").empty()) {
    if (Env("AWS_SECRET_ACCESS_KEY").empty()) {
      return Fail(Code::kDenied, "AWS_ACCESS_KEY_ID is set without AWS_SECRET_ACCESS_KEY");
    }
    return Found{.credentials = {Env("AWS_ACCESS_KEY_ID"), Env("AWS_SECRET_ACCESS_KEY"), Env("AWS_SESSION_TOKEN")},
                 .source = "environment"};
  }
  if (!Env("AWS_WEB_IDENTITY_TOKEN_FILE").empty() && !Env("AWS_ROLE_ARN").empty()) {
    Found found{.source = "web identity of AWS_ROLE_ARN", .may_change = true};
    found.web_identity = {Env("AWS_WEB_IDENTITY_TOKEN_FILE"), Env("AWS_ROLE_ARN"), Env("AWS_ROLE_SESSION_NAME")};
    return found;
  }
  return FindInProfile(ProfileName(options_), /*named=*/!Env("AWS_PROFILE").empty());
}

void CredentialsChain::Get(std::function<void(const Result<Credentials>&)> ready) {
  if (current_) {
    const int64_t left = expires_ == 0 ? kRenewSeconds + 1 : expires_ - NowSeconds();
    if (left > 0) {
      if (left <= kRenewSeconds && !fetching_) Fetch();
      return ready(*current_);
    }
    current_.reset();
  }
  waiting_.push_back(std::move(ready));
  if (!fetching_) Fetch();
}

void CredentialsChain::Renew(const Credentials& refused, std::function<void(bool changed)> done) {
  if (current_ && *current_ != refused) return done(true);  // Somebody was quicker.
  if (!may_change_ || (!fetching_ && clock_.Now() - unchanged_at_ < kLookAgain)) return done(false);
  waiting_.emplace_back([this, refused, done = std::move(done)](const Result<Credentials>& now) {
    const bool changed = now && *now != refused;
    if (!changed) unchanged_at_ = clock_.Now();
    done(changed);
  });
  if (fetching_) return;
  reloads_.Add();
  log::Info("s3_credentials_reloaded", {{"source", source_}});
  Fetch();
}

void CredentialsChain::Fetch() {
  fetching_ = true;
  const Result<Found> found = Find();
  if (!found) return Fetched(tl::unexpected(found.error()));
  source_ = found->source;
  may_change_ = found->may_change;
  const Credentials& keys = found->credentials;
  for (const std::string* text : {&keys.access_key_id, &keys.secret_access_key, &keys.session_token}) {
    if (std::any_of(text->begin(), text->end(), [](unsigned char c) { return std::iscntrl(c) != 0; })) {
      return Fetched(Fail(Code::kDenied, "the keys of " + source_ + " have a line break in them"));
    }
  }
  if (found->web_identity) return AssumeRole(*found->web_identity);
  expires_ = 0;
  Fetched(found->credentials);
}

void CredentialsChain::Fetched(Result<Credentials> credentials) {
  fetching_ = false;
  if (credentials) current_ = *credentials;
  for (auto& ready : std::exchange(waiting_, {})) ready(credentials);
}

void CredentialsChain::AssumeRole(const WebIdentity& identity) {
  const std::optional<std::string> token = ReadFile(identity.token_file);
  if (!token || Trim(*token).empty()) {
    return Fetched(Fail(Code::kDenied, "the web identity token " + identity.token_file + " can't be read"));
  }
  std::string endpoint = Env("AWS_ENDPOINT_URL_STS");
  if (endpoint.empty()) endpoint = "https://sts." + options_.region + ".amazonaws.com";
  while (endpoint.ends_with('/')) endpoint.pop_back();
  auto body = std::make_shared<std::string>(
      CanonicalQuery({{"Action", "AssumeRoleWithWebIdentity"},
                      {"RoleArn", identity.role_arn},
                      {"RoleSessionName", identity.session_name.empty() ? "terrace" : identity.session_name},
                      {"Version", "2011-06-15"},
                      {"WebIdentityToken", Trim(*token)}}));
  HttpRequest request{.method = "POST",
                      .url = endpoint + "/",
                      .headers = {"content-type: application/x-www-form-urlencoded"},
                      .body = {std::as_bytes(std::span(*body))},
                      .owner = body,
                      .deadline = clock_.Now() + kStsTimeout};
  const std::string scheme = endpoint.starts_with("http:") ? "http" : "https";
  http_.Start(std::move(request), [this, endpoint, scheme](const HttpResponse& response) {
    if (const Failure failure = FailureOf(response, scheme)) {
      Error error = ToError(failure, "assume the role at " + endpoint);
      error.code = Code::kDenied;
      return Fetched(tl::unexpected(std::move(error)));
    }
    Result<SessionCredentials> session = ParseAssumedRole(response.text);
    if (!session) return Fetched(Fail(session.error(), "assume the role at " + endpoint));
    expires_ = session->expires;
    Fetched(std::move(session->credentials));
  });
}

}  // namespace terrace::s3
