#include "client/node_link.h"

#include <poll.h>

#include <algorithm>
#include <chrono>

#include "client/wire.h"

namespace terrace {

using std::chrono::milliseconds;

Joining JoinNode(const std::string& socket, const std::shared_ptr<const Waker>& waker, TimePoint deadline,
                 const std::function<bool()>& abandoned) {
  Result<Fd> fd = ConnectTo(socket);
  if (!fd) return {};
  // Whoever listens there lends us the bytes that we take for KV.
  if (MayBeAnybodys(socket) && !PeerIsOurs(fd->get())) {
    return {.why = "who listens there is another user, and anybody may; give the node a socket in a folder of its own"};
  }
  const auto link = std::make_shared<Link>(*std::move(fd), waker);
  if (SendMessage(link->fd.get(), wire::Encode(wire::Header{.kind = wire::Kind::kHello})) != Sent::kYes) return {};
  std::vector<std::byte> buffer;
  Fd arena;
  for (;;) {
    const Received received = ReceiveMessage(link->fd.get(), buffer, arena);
    if (received == Received::kMessage) break;
    if (abandoned()) return {};
    if (received == Received::kBroken) return {.why = "it hung up; its own log says why (node_session_refused)"};
    const auto left = std::chrono::ceil<milliseconds>(deadline - std::chrono::steady_clock::now());
    if (left.count() <= 0)
      return {.why = "it listens and does not answer; is it stopped, or out of memory?", .silent = true};
    pollfd fds[] = {{.fd = waker->fd.get(), .events = POLLIN, .revents = 0},
                    {.fd = link->fd.get(), .events = POLLIN, .revents = 0}};
    poll(fds, 2, static_cast<int>(left.count()));
    if (fds[0].revents != 0) waker->Clear();
  }
  if (const auto version = wire::VersionOf(buffer); version && *version != wire::kVersion) {
    return {.why = "it speaks version " + std::to_string(*version) + " of the protocol and this program version " +
                   std::to_string(wire::kVersion) + "; use one release of terrace for the node and its engines"};
  }
  const Result<wire::Message> welcome = wire::Decode(buffer);
  if (!welcome || welcome->header.kind != wire::Kind::kWelcome || !arena) {
    return {.why = "its welcome makes no sense; use one release of terrace for the node and its engines"};
  }
  link->arena = Mapping::Map(arena.get(), welcome->header.numbers[1], false);
  if (!link->arena) return {.why = "its memory can't be mapped here; ulimit -v must be unlimited"};
  for (const auto& name : welcome->Items<wire::TierName>()) link->tier_names.push_back(wire::Text(name));
  return {.link = link};
}

}  // namespace terrace
