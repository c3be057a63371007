#include "s3/failure.h"

#include <map>
#include <optional>

#include "s3/xml.h"

namespace terrace::s3 {
namespace {

constexpr size_t kMessageBytesMax = 300;

// One line, bounded: it goes into logs and to the screen.
std::string OneLine(std::string_view text) {
  std::string line;
  for (const char c : text.substr(0, kMessageBytesMax)) {
    const bool blank = static_cast<unsigned char>(c) <= ' ';
    if (!blank) {
      line += c;
    } else if (!line.empty() && line.back() != ' ') {
      line += ' ';
    }
  }
  while (line.ends_with(' ') || line.ends_with('.')) line.pop_back();
  return line;
}

Trouble OfCode(const std::string& code) {
  static const std::map<std::string, Trouble, std::less<>> known = {
      {"NoSuchKey", Trouble::kNotFound},
      {"NoSuchUpload", Trouble::kNotFound},
      {"NoSuchBucket", Trouble::kNoBucket},
      {"InvalidAccessKeyId", Trouble::kWrongKey},
      {"SignatureDoesNotMatch", Trouble::kWrongKey},
      {"XAdminUserNotFound", Trouble::kWrongKey},  // versitygw's InvalidAccessKeyId.
      {"ExpiredToken", Trouble::kExpired},
      {"ExpiredTokenException", Trouble::kExpired},
      {"InvalidToken", Trouble::kExpired},
      {"TokenRefreshRequired", Trouble::kExpired},
      {"AccessDenied", Trouble::kDenied},
      {"AllAccessDisabled", Trouble::kDenied},
      {"AccountProblem", Trouble::kDenied},
      {"RequestTimeTooSkewed", Trouble::kClockSkew},
      {"AuthorizationHeaderMalformed", Trouble::kOtherRegion},
      {"PermanentRedirect", Trouble::kOtherRegion},
      {"TemporaryRedirect", Trouble::kOtherRegion},
      {"Redirect", Trouble::kOtherRegion},
      {"IllegalLocationConstraintException", Trouble::kOtherRegion},
      {"SlowDown", Trouble::kSlowDown},
      {"Throttling", Trouble::kSlowDown},
      {"ThrottlingException", Trouble::kSlowDown},
      {"RequestLimitExceeded", Trouble::kSlowDown},
      {"TooManyRequests", Trouble::kSlowDown},
      {"BandwidthLimitExceeded", Trouble::kSlowDown},
      {"ServiceUnavailable", Trouble::kSlowDown},
      {"InternalError", Trouble::kServer},
      {"RequestTimeout", Trouble::kTimeout},
      {"PreconditionFailed", Trouble::kExists},
      {"ConditionalRequestConflict", Trouble::kConflict},
      {"OperationAborted", Trouble::kConflict},
      {"InvalidRange", Trouble::kNoRange},
      {"NotImplemented", Trouble::kNotImplemented},
      {"MethodNotAllowed", Trouble::kNotImplemented},
      {"QuotaExceeded", Trouble::kFull},
      {"InsufficientStorage", Trouble::kFull},
      {"XMinioStorageFull", Trouble::kFull},
  };
  const auto it = known.find(code);
  return it == known.end() ? Trouble::kNone : it->second;
}

Trouble OfStatus(int status) {
  switch (status) {
    case 301:
    case 307: return Trouble::kOtherRegion;
    case 401: return Trouble::kWrongKey;
    case 403: return Trouble::kDenied;
    case 404: return Trouble::kNotFound;
    case 405:
    case 501: return Trouble::kNotImplemented;
    case 408: return Trouble::kTimeout;
    case 409: return Trouble::kConflict;
    case 412: return Trouble::kExists;
    case 416: return Trouble::kNoRange;
    case 429:
    case 503: return Trouble::kSlowDown;
    case 507: return Trouble::kFull;
    default: break;
  }
  if (status >= 500) return Trouble::kServer;
  if (status >= 400) return Trouble::kRefused;
  return status >= 200 && status < 300 ? Trouble::kNone : Trouble::kNoS3;
}

Trouble OfNetwork(HttpFailure failure, std::string_view scheme) {
  switch (failure) {
    case HttpFailure::kNone: return Trouble::kNone;
    case HttpFailure::kResolve: return Trouble::kUnresolved;
    case HttpFailure::kConnect: return Trouble::kUnreachable;
    case HttpFailure::kCertificate: return Trouble::kWrongCa;
    case HttpFailure::kCaFile: return Trouble::kCaFile;
    case HttpFailure::kPlainServer: return Trouble::kPlainServer;
    case HttpFailure::kTls: return Trouble::kTls;
    // What a TLS server says to a plain request is an alert of TLS, which is no HTTP.
    case HttpFailure::kNotHttp: return scheme == "http" ? Trouble::kTlsServer : Trouble::kNoS3;
    case HttpFailure::kTimeout: return Trouble::kTimeout;
    case HttpFailure::kEmpty:
    case HttpFailure::kCut: return Trouble::kCut;
    case HttpFailure::kTooLong: return Trouble::kNoS3;
    case HttpFailure::kStopped: return Trouble::kStopped;
    case HttpFailure::kCancelled: return Trouble::kCancelled;
  }
  return Trouble::kNoS3;
}

// A document that comes with a 2xx may be the bytes of an object, chosen by whoever wrote that. It says at most that
// this one call failed. Where the bucket is, whether the key holds, what time it is: that an answer says by its status.
bool MayComeWithSuccess(Trouble trouble) {
  switch (trouble) {
    case Trouble::kNotFound:
    case Trouble::kNoRange:
    case Trouble::kExists:
    case Trouble::kConflict:
    case Trouble::kSlowDown:
    case Trouble::kServer:
    case Trouble::kTimeout:
    case Trouble::kFull: return true;
    default: return false;
  }
}

// The statuses with which S3 says that a bucket is elsewhere: two redirects, and 400 for a signature of another region.
bool IsElsewhere(int status) { return status == 301 || status == 307 || status == 400; }

// What the document's code means together with the status that it came with.
Trouble OfDocument(const std::string& code, int status) {
  const Trouble by_status = OfStatus(status);
  Trouble named = OfCode(code);
  if (named == Trouble::kOtherRegion && !IsElsewhere(status)) named = Trouble::kNone;
  if (by_status == Trouble::kNone) return MayComeWithSuccess(named) ? named : Trouble::kServer;
  return named == Trouble::kNone ? by_status : named;
}

}  // namespace

const char* TroubleName(Trouble trouble) {
  switch (trouble) {
    case Trouble::kNone: return "none";
    case Trouble::kUnresolved: return "unresolved";
    case Trouble::kUnreachable: return "unreachable";
    case Trouble::kWrongCa: return "wrong_ca";
    case Trouble::kCaFile: return "ca_file";
    case Trouble::kPlainServer: return "plain_server";
    case Trouble::kTlsServer: return "tls_server";
    case Trouble::kTls: return "tls";
    case Trouble::kTimeout: return "timeout";
    case Trouble::kCut: return "cut";
    case Trouble::kNoS3: return "no_s3";
    case Trouble::kNoCredentials: return "no_credentials";
    case Trouble::kWrongKey: return "wrong_key";
    case Trouble::kExpired: return "expired";
    case Trouble::kDenied: return "denied";
    case Trouble::kClockSkew: return "clock_skew";
    case Trouble::kNoBucket: return "no_bucket";
    case Trouble::kOtherRegion: return "other_region";
    case Trouble::kNeedsPathStyle: return "needs_path_style";
    case Trouble::kNotFound: return "not_found";
    case Trouble::kNoRange: return "no_range";
    case Trouble::kExists: return "exists";
    case Trouble::kConflict: return "conflict";
    case Trouble::kSlowDown: return "slow_down";
    case Trouble::kServer: return "server";
    case Trouble::kFull: return "full";
    case Trouble::kNotImplemented: return "not_implemented";
    case Trouble::kRefused: return "refused";
    case Trouble::kStopped: return "stopped";
    case Trouble::kCancelled: return "cancelled";
  }
  return "unknown";
}

std::string Failure::Describe() const {
  std::string text;
  if (status != 0) text = std::to_string(status);
  if (!code.empty()) text += (text.empty() ? "" : " ") + code;
  if (text.empty()) return message.empty() ? TroubleName(trouble) : message;
  return message.empty() ? text : text + ": " + message;
}

Failure FailureOf(const HttpResponse& response, std::string_view scheme) {
  Failure failure{.trouble = OfNetwork(response.failure, scheme), .status = response.status};
  if (failure) {
    failure.message = OneLine(response.why);
    return failure;
  }
  failure.trouble = OfStatus(response.status);
  const std::optional<ErrorDocument> document = ParseErrorDocument(response.text);
  if (!failure && !document) return failure;
  failure.date = OneLine(response.Header("date"));
  if (document) {
    failure.code = OneLine(document->code);
    failure.message = OneLine(document->message);
    failure.trouble = OfDocument(document->code, response.status);
  } else if (response.status == 400 && response.text.find("HTTPS") != std::string::npos) {
    failure.trouble = Trouble::kTlsServer;  // "Client sent an HTTP request to an HTTPS server."
    failure.message = OneLine(response.text);
  }
  if (failure.trouble == Trouble::kOtherRegion) {
    const std::string& header = response.Header("x-amz-bucket-region");
    const std::string& said = document && !document->region.empty() ? document->region : header;
    if (IsRegionName(said)) failure.region = said;
  }
  return failure;
}

bool IsTransient(Trouble trouble) {
  switch (trouble) {
    case Trouble::kUnreachable:
    case Trouble::kTimeout:
    case Trouble::kCut:
    case Trouble::kConflict:
    case Trouble::kSlowDown:
    case Trouble::kServer: return true;
    default: return false;
  }
}

bool MayBeTheObjectsOwn(Trouble trouble) {
  return trouble == Trouble::kDenied || trouble == Trouble::kRefused || trouble == Trouble::kNotImplemented ||
         trouble == Trouble::kNoS3;
}

bool IsRefusal(const Failure& failure) {
  if (failure.trouble == Trouble::kWrongKey || failure.trouble == Trouble::kExpired) return true;
  // Answers to HEAD have no document: these may be the same.
  return failure.code.empty() && (failure.status == 400 || failure.status == 403);
}

std::string Remedy(const Failure& failure, const Endpoint& endpoint) {
  const std::string host = endpoint.HostHeader();
  switch (failure.trouble) {
    case Trouble::kUnresolved:
      if (endpoint.style == Style::kVirtual) {
        return host + " has no address: correct the endpoint; or, if " + endpoint.host +
               " has one, its server wants --s3-addressing path";
      }
      return host + " has no address: correct the endpoint, or the name server";
    case Trouble::kTimeout: return "is it overloaded, or does a firewall swallow what it says?";
    case Trouble::kUnreachable: return "is the server up, is the port right, does a firewall forbid it?";
    case Trouble::kWrongCa:
      return "give the CA that signed the server's certificate by --s3-ca-file, and use the name in the certificate";
    case Trouble::kCaFile: return "correct --s3-ca-file: a PEM file that can be read";
    case Trouble::kPlainServer:
      return "this port speaks plain http: write http:// in the endpoint, or with s3:// --s3-disable-tls";
    case Trouble::kTlsServer:
      return "this port speaks TLS: write https:// in the endpoint, or with s3:// --s3-disable-tls=off";
    case Trouble::kNoS3: return "this is no S3 endpoint: correct the host and port";
    case Trouble::kNoCredentials:
      return "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a profile by AWS_PROFILE";
    case Trouble::kWrongKey: return "correct the access key and the secret key";
    case Trouble::kExpired: return "get new credentials; a profile's file is read again by itself";
    case Trouble::kDenied:
      return "the key needs s3:ListBucket on bucket " + endpoint.bucket +
             " and s3:GetObject, s3:PutObject, s3:DeleteObject on " + endpoint.bucket + "/" +
             (endpoint.prefix.empty() ? "*" : endpoint.prefix + "/*");
    case Trouble::kClockSkew: return "set this host's clock (chrony, ntp): the server says it is " + failure.date;
    case Trouble::kNoBucket: return "create bucket " + endpoint.bucket + ", or correct --s3-bucket";
    case Trouble::kOtherRegion:
      return failure.region.empty() ? "the bucket is in another region or on another host: correct --s3-region or the "
                                      "endpoint"
                                    : "the bucket is in another region: --s3-region " + failure.region;
    case Trouble::kNeedsPathStyle: return "this server knows no virtual-hosted buckets: --s3-addressing path";
    case Trouble::kFull: return "free space, or raise the bucket's quota";
    default: return "";
  }
}

Error ToError(const Failure& failure, const std::string& what) {
  Code code = Code::kUnavailable;
  switch (failure.trouble) {
    case Trouble::kTimeout: code = Code::kTimeout; break;
    case Trouble::kNoCredentials:
    case Trouble::kWrongKey:
    case Trouble::kExpired:
    case Trouble::kDenied: code = Code::kDenied; break;
    case Trouble::kFull: code = Code::kFull; break;
    case Trouble::kCancelled: code = Code::kCancelled; break;
    case Trouble::kUnreachable:
    case Trouble::kCut: code = Code::kIo; break;
    default: break;
  }
  return {code, what + ": " + failure.Describe(), 0};
}

}  // namespace terrace::s3
