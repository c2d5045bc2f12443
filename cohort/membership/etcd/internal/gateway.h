#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

/// What is said to etcd's HTTP/JSON gateway, v3, and what it answers. Texts only: no input or output.
namespace cohort::membership::etcd {

/// The longest answer that is read. etcd takes requests of 1.5 MiB unless it is told otherwise.
inline constexpr std::size_t kMaxAnswerBytes = std::size_t{16} << 20;

/// The record's key as etcd has it.
struct EtcdKeyValue {
  std::uint64_t revision = 0;  ///< of the last change of the key; 0: there is no such key
  std::string text;

  bool operator==(const EtcdKeyValue&) const = default;
};

/// Asks for a key; with `with_text` false for its revision alone.
std::string read_request(std::string_view key, bool with_text);
/// Writes the text if the key's revision is `expected`, and asks for the key where it is not. Under a lease
/// the key goes when the lease ends.
std::string swap_request(std::string_view key, std::uint64_t expected, std::string_view text,
                         std::optional<std::uint64_t> lease);
/// Asks for changes of a key from a revision of etcd's on.
std::string watch_request(std::string_view key, std::uint64_t from);
std::string login_request(std::string_view user, std::string_view password);
std::string lease_request(std::chrono::seconds time);

/// In each answer: which cluster answered, and its revision then.
struct Header {
  std::uint64_t cluster = 0, revision = 0;

  bool operator==(const Header&) const = default;
};
struct ReadAnswer {
  Header header;
  EtcdKeyValue entry;
};
struct SwapAnswer {
  Header header;
  bool is_made = false;
  EtcdKeyValue entry;  ///< where it was not made: what is there
};
/// A line of a watch.
struct WatchAnswer {
  Header header;
  bool is_canceled = false;           ///< it has no further line
  std::uint64_t compacted = 0;        ///< of one that was canceled: revisions before this one are gone
  std::string reason;                 ///< of one that was canceled
  std::uint64_t changed_at = 0;       ///< revision of the newest change in it; 0: it has none
  std::optional<EtcdKeyValue> entry;  ///< after the newest change; nothing where the key was deleted
};

// Each throws: CommError for what is no such answer.

ReadAnswer parse_read(std::string_view text);
SwapAnswer parse_swap(std::string_view text);
WatchAnswer parse_watch(std::string_view line);
std::string parse_login(std::string_view text);    ///< the token
std::uint64_t parse_lease(std::string_view text);  ///< its id

/// Why etcd made no request.
struct Rejection {
  enum class Type : std::uint8_t {
    kLogin,     ///< the token is old, or none was sent
    kNoLogin,   ///< there is no authentication
    kOther,     ///< by what etcd knows: the same at each endpoint
    kNoPath,    ///< this endpoint has no such path: another version of etcd, or no gateway
    kEndpoint,  ///< this endpoint cannot now, or is no gateway of etcd
  };
  Type type = Type::kEndpoint;
  std::string text;  ///< what is wrong, and what to do
};

/// Of an answer with another status than 200.
Rejection parse_rejection(int status, std::string_view body);
/// Of what etcd says in an answer, or as the reason why a watch was canceled.
Rejection rejection_of(std::string_view sentence);

}  // namespace cohort::membership::etcd
