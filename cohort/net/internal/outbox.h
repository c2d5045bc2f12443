#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cohort/net/internal/frame.h"
#include "cohort/net/internal/handles.h"
#include "cohort/net/message.h"

namespace cohort::net {

/// What it takes to keep a message, besides its bytes.
inline constexpr std::size_t kKeepBytes = 256;
/// Bytes that a message counts for in the window. An answer counts for none.
inline std::size_t cost_of(std::uint32_t channel, std::size_t bytes) {
  return channel < kAnswerChannels ? bytes + kKeepBytes : 0;
}

/// What goes to a peer: messages are queued, cut into frames, and kept until the peer has them.
///
/// Reads no clock and does no input or output: gather() says which bytes to write next, written() how many
/// were. Threads: one at a time.
class Outbox {
 public:
  /// `window`: bytes that may be on their way (cost_of()); a message that is larger goes alone. Answers do
  /// not count.
  explicit Outbox(std::size_t window) : window_(window) {}
  void set_window(std::size_t window) { window_ = window; }

  /// Returns the message's ticket for replace(). Throws: UsageError for more than kMaxPayloads payloads or
  /// kMaxHeaderBytes bytes.
  std::uint64_t push(Message message);
  /// Exchanges a message that has not begun with `other`, of the same channel. False where it has begun.
  /// Throws: as push().
  bool replace(std::uint64_t ticket, Message& other);
  /// A frame of the header alone goes before all that has no frame yet.
  void push_control(FrameKind kind);

  /// Appends the next bytes to write, as the window allows: about `most_bytes`, in about `most_parts` parts.
  /// New frames carry `acknowledged` and `released`. Returns whether there are new ones.
  bool gather(std::vector<iovec>& parts, std::uint64_t acknowledged, std::uint64_t released,
              std::size_t most_bytes = 512 * 1024, std::size_t most_parts = 128);
  void written(std::size_t num_bytes);
  /// Whether gather() would give something.
  bool has_bytes() const { return !frames_.empty() || may_make_frame(); }

  /// The peer has all messages up to `message`, and has used `released` bytes in all.
  /// Throws: CommError where it cannot.
  void on_peer_state(std::uint64_t message, std::uint64_t released);
  /// There is no link any more, or a new one: what the peer has not got goes whole, in the order of its
  /// numbers. Throws: CommError where the peer says that it has what was never sent.
  void restart(std::uint64_t received_by_peer);
  /// From now on, over this link, payloads go by handle where they can.
  void use_handles(std::shared_ptr<const Handles> handles) { handles_ = std::move(handles); }
  bool uses_handles() const { return handles_ != nullptr; }
  /// The messages that the peer may not have got: begun ones in order, then those of each channel. Empties
  /// the box.
  std::vector<Message> take_all();

  std::size_t num_queued() const { return num_queued_; }  ///< messages that have not begun
  std::size_t num_unsent() const;                         ///< that are not wholly written
  std::size_t bytes_unsent() const;                       ///< what is not written of those
  std::size_t num_kept() const { return begun_.size(); }  ///< that have begun and are not acknowledged
  std::uint64_t bytes_on_the_way() const { return begun_cost_ - released_; }
  std::uint64_t bytes_by_handle() const { return bytes_by_handle_; }  ///< so far, of messages that have begun
  bool is_blocked() const { return num_queued_ > 0 && !may_begin(); }  ///< by the window

 private:
  struct Queued {
    std::uint64_t ticket;
    Message message;
  };
  struct Begun {
    Message message;
    // Of payloads that go by handle over this link: the handles. Also those of earlier links are kept, as the
    // peer may have got them.
    std::vector<std::optional<Handles::Lent>> lent;
    std::vector<std::string> handles;  // encoded; empty: the payload itself goes. None: all do
    std::size_t size = 0;              // bytes, with handles in place of payloads
    std::size_t position = 0;          // of the bytes: so many are in frames
    int frames = 0;                    // that are not written yet
    bool was_sent = false;             // whole, over this link or an earlier one
    bool is_sent() const { return position == size && frames == 0; }
  };
  struct Frame {
    std::string head;           // header, and the table of a message that begins
    std::vector<iovec> parts;   // of the message
    std::size_t size = 0;       // of both
    std::uint64_t message = 0;  // 0: none
  };

  // Kinds of channels by their first message.
  enum Turn : std::uint8_t { kShortCall, kLongCall, kShortAnswer, kLongAnswer, kNone };
  bool may_make_frame() const;
  bool may_begin() const { return next_turn() != kNone; }
  Turn next_turn() const;
  Turn next_turn_of(Turn short_ones, Turn long_ones) const;
  void make_frame(std::uint64_t acknowledged, std::uint64_t released);
  std::uint64_t begin_next();
  void cut(std::uint64_t number, std::uint64_t acknowledged, std::uint64_t released);
  void lend_payloads(Begun& begun);
  static std::string table_of(const Begun& begun);
  static void append_bytes(std::vector<iovec>& parts, const Begun& begun, std::size_t begin, std::size_t end);
  static Turn turn_of(const Message& message);
  void put_in_turn(std::uint32_t channel);
  void end_cutting(std::uint32_t channel);

  std::size_t window_;
  std::shared_ptr<const Handles> handles_;
  std::uint64_t bytes_by_handle_ = 0;
  // Not begun: by channel, and the channels of each kind in turn. A channel is in turn while it has a message
  // and none of it is in `cutting_` or `resend_`: `num_uncut_` counts those.
  std::map<std::uint32_t, std::deque<Queued>> queues_;
  std::uint64_t last_ticket_ = 0;
  std::map<std::uint32_t, int> num_uncut_;
  std::array<std::deque<std::uint32_t>, kNone> turns_;
  bool is_answers_turn_ = true;
  std::size_t num_queued_ = 0;
  // Begun, by number. `resend_`: after a new link, to be begun again, in order. `cutting_`: those of which a
  // part is in frames, in turn.
  std::map<std::uint64_t, Begun> begun_;
  std::deque<std::uint64_t> resend_, cutting_;
  std::uint64_t next_number_ = 1;
  std::uint64_t begun_cost_ = 0, released_ = 0;
  std::size_t short_bytes_ = 0;  // of short messages since the last piece of a long one
  // Made, and not all written.
  std::deque<FrameKind> controls_;
  std::deque<Frame> frames_;
  std::size_t first_written_ = 0;  // bytes of the first frame
};

}  // namespace cohort::net
