// What can go wrong between us and a bucket, named: the client decides by it what to try again, the store what an
// item's end is, start-up and doctor what to tell the operator.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "io/http_client.h"
#include "s3/endpoint.h"
#include "terrace/result.h"

namespace terrace::s3 {

enum class Trouble : uint8_t {
  kNone,
  kUnresolved,      // The host has no address.
  kUnreachable,     // Nobody listens there.
  kWrongCa,         // The server's certificate is not one that we trust.
  kCaFile,          // Our CA file can't be read.
  kPlainServer,     // https to a port that speaks http.
  kTlsServer,       // http to a port that speaks https.
  kTls,             // Other trouble of TLS.
  kTimeout,         // No answer in time.
  kCut,             // The connection broke, or a body had another length than said.
  kNoS3,            // An answer that no S3 server gives.
  kNoCredentials,   // None found, or the role can't be assumed.
  kWrongKey,        // The key is unknown, or the signature is not right: a wrong secret.
  kExpired,         // Credentials that held once.
  kDenied,          // Right credentials without the right.
  kClockSkew,       // Our clock and the server's are too far apart.
  kNoBucket,        // The bucket does not exist.
  kOtherRegion,     // The bucket is in another region.
  kNeedsPathStyle,  // The server does not know buckets by host name.
  kNotFound,        // No such object, or upload.
  kNoRange,         // The object ends before the range begins.
  kExists,          // A conditional PUT, and the object is there.
  kConflict,        // Somebody else writes the same object now.
  kSlowDown,        // The server asks for less.
  kServer,          // The server failed.
  kFull,            // No room, or a quota.
  kNotImplemented,  // The server does not do this.
  kRefused,         // Any other 4xx.
  kStopped,         // Our reader wanted no more.
  kCancelled,
};
const char* TroubleName(Trouble trouble);  // "wrong_ca", ...: a metric's label, a word for scripts.

struct Failure {
  Trouble trouble = Trouble::kNone;
  int status = 0;       // Of HTTP; 0: there was no answer.
  std::string code;     // The server's word, "SlowDown".
  std::string message;  // The server's or the network's words. Never a secret.
  std::string region;   // With kOtherRegion, if the server said; a region's name in its form.
  std::string date;     // With kClockSkew: the server's time.

  explicit operator bool() const { return trouble != Trouble::kNone; }
  std::string Describe() const;  // "403 AccessDenied: no rights on this prefix".
};

// Of an answer. The body of a 2xx that is an error document makes it a failure, too, but only of this one call: it
// can't say that the bucket is elsewhere, that the key is refused or that the clock is wrong.
Failure FailureOf(const HttpResponse& response, std::string_view scheme);

// Worth another try of the same request.
bool IsTransient(Trouble trouble);
// The server may refuse this one object and no other: one in an archive, under a lock or a rule of its own, as whoever
// writes to the bucket can make it.
bool MayBeTheObjectsOwn(Trouble trouble);
// The server did not take the credentials: they may have been replaced.
bool IsRefusal(const Failure& failure);

// What to do about it, for people: "create the bucket, or correct --s3-bucket". "" if nothing particular.
std::string Remedy(const Failure& failure, const Endpoint& endpoint);

// `what` was attempted: "get kv/frames/...". The code of the error says which action.
Error ToError(const Failure& failure, const std::string& what);

}  // namespace terrace::s3
