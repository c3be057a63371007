#include "client/node_link.h"

#include <poll.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

#include "client/wire.h"

namespace terrace {

namespace {

using std::chrono::milliseconds;

// Why nobody answers at `socket`, and what to do.
Joining Missing(const std::string& socket, const Error& error) {
  const bool has_file = !socket.starts_with('@');
  struct stat file{};
  const bool is_socket = has_file && stat(socket.c_str(), &file) == 0 && S_ISSOCK(file.st_mode);
  const std::string start = "start `terrace node --socket " + socket + "`, or correct the path";
  switch (error.os_error) {
    case ENOENT: return {.why = "there is no such file; " + start};
    case ENOTDIR: return {.why = "a part of its path is no folder; correct the path"};
    case EACCES:
      return {.why =
                  "this user may not open it; the user of the engine belongs in the node's group, and needs to pass "
                  "through all folders of the path"};
    case EPROTOTYPE: return {.why = "another program's socket; correct the path"};
    case EAGAIN: return {.why = "more clients wait there than it takes; does the node hang?"};
    case ECONNREFUSED:
      if (has_file && !is_socket) return {.why = "the file is no socket; correct the path"};
      if (has_file) return {.why = "nobody listens there: its node has ended; start it again"};
      return {.why = "nobody listens there; " + start};
    default: return {.why = error.what};
  }
}

Joining Refused(std::string why) { return {.why = std::move(why), .refused = true}; }

}  // namespace

Joining JoinNode(const std::string& socket, const std::shared_ptr<const Waker>& waker, TimePoint deadline,
                 const std::function<bool()>& abandoned) {
  Result<Fd> fd = ConnectTo(socket);
  if (!fd) return Missing(socket, fd.error());
  // Whoever listens there lends us the bytes that we take for KV.
  if (MayBeAnybodys(socket) && !PeerIsOurs(fd->get())) {
    return Refused("who listens there is another user, and anybody may; give the node a socket in a folder of its own");
  }
  const auto link = std::make_shared<Link>(*std::move(fd), waker);
  if (SendMessage(link->fd.get(), wire::Encode(wire::Header{.kind = wire::Kind::kHello})) != Sent::kYes) return {};
  std::vector<std::byte> buffer;
  Fd arena;
  for (;;) {
    const Received received = ReceiveMessage(link->fd.get(), buffer, arena);
    if (received == Received::kMessage) break;
    if (abandoned()) return {};
    if (received == Received::kBroken) {
      // One that is killed hangs up as well as one that refuses, and then nobody listens.
      if (const Result<Fd> again = ConnectTo(socket); !again) return Missing(socket, again.error());
      return Refused("it hung up; its own log says why (node_session_refused)");
    }
    const auto left = std::chrono::ceil<milliseconds>(deadline - std::chrono::steady_clock::now());
    if (left.count() <= 0)
      return {
          .why = "it listens and does not answer; is it stopped, or out of memory?", .refused = true, .silent = true};
    pollfd fds[] = {{.fd = waker->fd.get(), .events = POLLIN, .revents = 0},
                    {.fd = link->fd.get(), .events = POLLIN, .revents = 0}};
    poll(fds, 2, static_cast<int>(left.count()));
    if (fds[0].revents != 0) waker->Clear();
  }
  if (const auto version = wire::VersionOf(buffer); version && *version != wire::kVersion) {
    return Refused("it speaks version " + std::to_string(*version) + " of the protocol and this program version " +
                   std::to_string(wire::kVersion) + "; use one release of terrace for the node and its engines");
  }
  const Result<wire::Message> welcome = wire::Decode(buffer);
  if (!welcome || welcome->header.kind != wire::Kind::kWelcome || !arena) {
    return Refused("its welcome makes no sense; use one release of terrace for the node and its engines");
  }
  link->arena = Mapping::Map(arena.get(), welcome->header.numbers[1], false);
  if (!link->arena) return Refused("its memory can't be mapped here; ulimit -v must be unlimited");
  for (const auto& name : welcome->Items<wire::TierName>()) link->tier_names.push_back(wire::Text(name));
  return {.link = link};
}

}  // namespace terrace
