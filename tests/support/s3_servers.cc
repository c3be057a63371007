#include "tests/support/s3_servers.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <future>
#include <iterator>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "base/assert.h"

namespace terrace {
namespace {

constexpr std::chrono::seconds kStartMax{60};  // SeaweedFS under a sanitizer's load.

// Nobody else takes it while we hold no socket on it: most likely.
uint16_t FreePort() {
  // Below 32768, where the kernel does not take ports for connections; and below it by 10000, where SeaweedFS has its
  // second ports.
  // Programs that start at once have neighbouring numbers: each takes a stretch of its own.
  static std::atomic<uint16_t> next{static_cast<uint16_t>(11000 + getpid() % 225 * 40)};
  for (;;) {
    const uint16_t port = next.fetch_add(1);
    bool free = true;
    for (const uint16_t p : {port, static_cast<uint16_t>(port + 10000)}) {
      const int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
      sockaddr_in address{};
      address.sin_family = AF_INET;
      address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      address.sin_port = htons(p);
      free = free && bind(s, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
      close(s);
    }
    if (free) return port;
  }
}

int Spawn(const std::vector<std::string>& command, const std::string& log) {
  const int parent = getpid();
  const int pid = fork();
  TERRACE_ASSERT(pid >= 0);
  if (pid > 0) return pid;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);
  const int out = open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  dup2(out, 1);
  dup2(out, 2);
  std::vector<char*> argv;
  for (const std::string& word : command) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  execv(argv[0], argv.data());
  _exit(127);
}

void Run(const std::vector<std::string>& command, const std::string& log) {
  int status = 0;
  const int pid = Spawn(command, log);
  TERRACE_ASSERT(waitpid(pid, &status, 0) == pid && status == 0);
}

std::string Binary(const char* variable) {
  const char* path = std::getenv(variable);
  TERRACE_ASSERT(path != nullptr);  // scripts/setup env
  return path;
}

}  // namespace

S3Server& S3Server::Get(Kind kind, bool tls) {
  static std::map<std::pair<Kind, bool>, std::unique_ptr<S3Server>> servers;
  std::unique_ptr<S3Server>& server = servers[{kind, tls}];
  if (!server) server.reset(new S3Server(kind, tls));
  return *server;
}

S3Server::S3Server(Kind kind, bool tls) : kind_(kind), tls_(tls) {
  std::string name = (std::filesystem::temp_directory_path() / "terrace-s3-XXXXXX").string();
  TERRACE_ASSERT(mkdtemp(name.data()) != nullptr);
  directory_ = name;
  std::filesystem::create_directory(directory_ + "/data");
  if (tls) MakeCertificate();
  Start();
  WaitUntilItServes();
}

S3Server::~S3Server() {
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
  std::error_code ignored;
  std::filesystem::remove_all(directory_, ignored);
}

void S3Server::MakeCertificate() {
  const std::string d = directory_ + "/";
  const std::string log = d + "openssl.log";
  std::ofstream(d + "names") << "subjectAltName=DNS:localhost,DNS:s3.localhost,DNS:*.s3.localhost,IP:127.0.0.1\n";
  Run({"/usr/bin/openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
       "-days", "2", "-subj", "/CN=Terrace test CA", "-keyout", d + "ca.key", "-out", d + "ca.pem"},
      log);
  Run({"/usr/bin/openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj",
       "/CN=s3.localhost", "-keyout", d + "server.key", "-out", d + "server.csr"},
      log);
  Run({"/usr/bin/openssl", "x509", "-req", "-in", d + "server.csr", "-CA", d + "ca.pem", "-CAkey", d + "ca.key",
       "-CAcreateserial", "-days", "2", "-extfile", d + "names", "-out", d + "server.pem"},
      log);
  ca_file_ = d + "ca.pem";
}

void S3Server::Start() {
  const std::string d = directory_ + "/";
  port_ = FreePort();
  std::vector<std::string> command;
  if (kind_ == Kind::kVersitygw) {
    command = {Binary("VERSITYGW"), "--port",       "127.0.0.1:" + std::to_string(port_),
               "--virtual-domain",  "s3.localhost", "--access",
               kAccessKey,          "--secret",     kSecretKey,
               "--keep-alive",      "--quiet"};
    // It goes into its folder before it reads them: whole paths.
    if (tls_) command.insert(command.end(), {"--cert", d + "server.pem", "--key", d + "server.key"});
    command.insert(command.end(), {"posix", d + "data"});
  } else {
    std::ofstream(d + "identity.json")
        << R"({"identities": [{"name": "terrace", "actions": ["Admin", "Read", "Write", )"
        << R"("List", "Tagging"], "credentials": [{"accessKey": ")" << kAccessKey << R"(", "secretKey": ")"
        << kSecretKey << R"("}]}]})";
    const auto port = [](uint16_t number) { return std::to_string(number); };
    command = {Binary("WEED"),
               "server",
               "-dir=" + d + "data",
               "-ip=127.0.0.1",
               "-ip.bind=127.0.0.1",
               "-filer",
               "-s3",
               "-master.port=" + port(FreePort()),
               "-volume.port=" + port(FreePort()),
               "-filer.port=" + port(FreePort()),
               "-s3.port=" + port(tls_ ? FreePort() : port_),
               "-s3.domainName=s3.localhost",
               "-s3.config=" + d + "identity.json",
               "-s3.port.iceberg=0",
               "-s3.port.lance=0",
               "-master.telemetry=false",
               "-master.volumeSizeLimitMB=64",
               "-volume.max=64"};
    if (tls_) {
      command.insert(command.end(), {"-s3.port.https=" + port(port_), "-s3.cert.file=" + d + "server.pem",
                                     "-s3.key.file=" + d + "server.key"});
    }
  }
  pid_ = Spawn(command, d + "log");
}

s3::ClientOptions S3Server::Client(const std::string& prefix, s3::Style style) const {
  s3::ClientOptions options;
  const std::string host = style == s3::Style::kVirtual ? "s3.localhost" : "127.0.0.1";
  const auto endpoint = s3::ParseEndpoint(
      {.endpoint = (tls_ ? "https://" : "http://") + host + ":" + std::to_string(port_),
       .bucket = kBucket,
       .prefix = prefix,
       .addressing = style == s3::Style::kVirtual ? s3::Addressing::kVirtual : s3::Addressing::kPath});
  TERRACE_ASSERT(endpoint.has_value());
  options.endpoint = *endpoint;
  options.credentials.fixed = {kAccessKey, kSecretKey, ""};
  options.http.ca_file = ca_file_;
  return options;
}

// Makes the bucket, and writes into it: a server that answers may not take objects yet.
void S3Server::WaitUntilItServes() {
  const SystemClock clock;
  Metrics metrics;
  const auto client = s3::OpenClient(Client("", s3::Style::kPath), clock, metrics);
  const TimePoint deadline = clock.Now() + kStartMax;
  for (const std::string& key : {std::string(), std::string("ready")}) {
    for (;;) {
      std::promise<s3::Failure> end;
      client->executor().Post([&] {
        client->Put({.key = key, .deadline = clock.Now() + std::chrono::seconds(10)},
                    [&end](const s3::Failure& failure, const s3::ObjectInfo&) { end.set_value(failure); });
      });
      const s3::Failure failure = end.get_future().get();
      if (!failure) break;
      int status = 0;
      if (clock.Now() > deadline || waitpid(pid_, &status, WNOHANG) == pid_) {
        std::ifstream log(directory_ + "/log");
        const std::string text{std::istreambuf_iterator<char>(log), {}};
        std::fprintf(stderr, "the S3 server does not start (%s):\n%s\n", failure.Describe().c_str(),
                     text.substr(text.size() > 4000 ? text.size() - 4000 : 0).c_str());
        std::abort();
      }
      poll(nullptr, 0, 50);
    }
  }
}

}  // namespace terrace
