#include "s3/xml.h"

#include <algorithm>
#include <charconv>
#include <ctime>
#include <pugixml.hpp>
#include <string>

namespace terrace::s3 {
namespace {

// More than any server allows of one object, and few enough that sums of them are right.
constexpr uint64_t kObjectBytesMax = 1ull << 50;

// Names in these documents have a default namespace and no prefix, so pugixml's plain names are theirs.
struct Document {
  pugi::xml_document document;
  bool good;
  explicit Document(std::string_view text)
      : good(document.load_buffer(text.data(), text.size(), pugi::parse_default | pugi::parse_ws_pcdata_single)) {}
  pugi::xml_node root() const { return good ? document.document_element() : pugi::xml_node(); }
  std::string_view root_name() const { return root().name(); }
};

template <class T>
bool ParseNumber(std::string_view text, T& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

tl::unexpected<Error> NotA(const char* what, const Document& document) {
  return Fail(Code::kUnavailable, std::string("the server's answer is no ") + what +
                                      (document.good ? ", but <" + std::string(document.root_name()) + ">" : ""));
}

}  // namespace

std::optional<ErrorDocument> ParseErrorDocument(std::string_view text) {
  // Most bodies that come here are empty, or a frame of megabytes that got this far by mistake.
  const size_t begin = text.find_first_not_of(" \t\r\n");
  if (begin == std::string_view::npos || text[begin] != '<') return std::nullopt;
  const Document document(text);
  pugi::xml_node error = document.root();
  if (document.root_name() == "ErrorResponse") error = error.child("Error");
  if (std::string_view(error.name()) != "Error") return std::nullopt;
  return ErrorDocument{.code = error.child_value("Code"),
                       .message = error.child_value("Message"),
                       .region = error.child_value("Region")};
}

Result<ListPage> ParseListPage(std::string_view text) {
  const Document document(text);
  if (document.root_name() != "ListBucketResult") return NotA("list of objects", document);
  ListPage page;
  for (const pugi::xml_node node : document.root().children("Contents")) {
    ListPage::Object object{.key = node.child_value("Key")};
    if (object.key.empty() || !ParseNumber(std::string_view(node.child_value("Size")), object.bytes)) {
      return NotA("list of objects with keys and sizes", document);
    }
    object.bytes = std::min(object.bytes, kObjectBytesMax);
    object.modified = ParseIsoTime(node.child_value("LastModified")).value_or(0);
    page.objects.push_back(std::move(object));
  }
  if (std::string_view(document.root().child_value("IsTruncated")) == "true") {
    page.next = document.root().child_value("NextContinuationToken");
    if (page.next.empty()) return NotA("list that says where it goes on", document);
  }
  return page;
}

bool IsListOfBuckets(std::string_view text) { return Document(text).root_name() == "ListAllMyBucketsResult"; }

Result<std::string> ParseUploadId(std::string_view text) {
  const Document document(text);
  std::string id = document.root().child_value("UploadId");
  if (document.root_name() != "InitiateMultipartUploadResult" || id.empty()) return NotA("upload id", document);
  return id;
}

Result<UploadPage> ParseUploadPage(std::string_view text) {
  const Document document(text);
  if (document.root_name() != "ListMultipartUploadsResult") return NotA("list of uploads", document);
  UploadPage page;
  for (const pugi::xml_node node : document.root().children("Upload")) {
    const std::optional<int64_t> initiated = ParseIsoTime(node.child_value("Initiated"));
    UploadPage::Upload upload{.key = node.child_value("Key"), .id = node.child_value("UploadId")};
    // Of unknown age: left alone. Without an id: an abort would be a removal of the object.
    if (!initiated || upload.key.empty() || upload.id.empty()) continue;
    upload.initiated = *initiated;
    page.uploads.push_back(std::move(upload));
  }
  return page;
}

Result<SessionCredentials> ParseAssumedRole(std::string_view text) {
  const Document document(text);
  const pugi::xml_node node = document.root().child("AssumeRoleWithWebIdentityResult").child("Credentials");
  SessionCredentials session{.credentials = {.access_key_id = node.child_value("AccessKeyId"),
                                             .secret_access_key = node.child_value("SecretAccessKey"),
                                             .session_token = node.child_value("SessionToken")}};
  const std::optional<int64_t> expires = ParseIsoTime(node.child_value("Expiration"));
  if (session.credentials.access_key_id.empty() || session.credentials.secret_access_key.empty() || !expires) {
    return NotA("role's credentials", document);
  }
  session.expires = *expires;
  return session;
}

std::string CompleteUploadBody(const std::vector<std::string>& etags) {
  std::string body = "<CompleteMultipartUpload xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">";
  for (size_t i = 0; i < etags.size(); ++i) {
    std::string etag;
    for (const char c : etags[i]) {
      if (c == '&' || c == '<') continue;  // In no real one.
      etag += c;
    }
    body += "<Part><PartNumber>" + std::to_string(i + 1) + "</PartNumber><ETag>" + etag + "</ETag></Part>";
  }
  return body + "</CompleteMultipartUpload>";
}

std::optional<int64_t> ParseIsoTime(std::string_view text) {
  tm utc{};
  const std::string copy(text.substr(0, 19));
  const char* end = strptime(copy.c_str(), "%Y-%m-%dT%H:%M:%S", &utc);
  if (end == nullptr || *end != '\0') return std::nullopt;
  return timegm(&utc);
}

}  // namespace terrace::s3
