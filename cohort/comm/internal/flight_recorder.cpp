// The last calls stand in a ring. A ticket is the count of calls before, so it gives the place in the ring,
// and tells whether a later call has taken that. Only return addresses are kept for each call; names are
// looked up when a report is made. Always: a late set() of a call that was pushed out changes nothing.
#include "cohort/comm/internal/flight_recorder.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <sstream>
#include <string_view>

namespace cohort::comm {
namespace {

std::string hexadecimal(std::uintptr_t number) {
  std::ostringstream out;
  out << "0x" << std::hex << number;
  return out.str();
}

std::string demangled(const char* name) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> text(abi::__cxa_demangle(name, nullptr, nullptr, &status),
                                                         &std::free);
  return status == 0 && text != nullptr ? text.get() : name;
}

std::uintptr_t number(const void* address) {
  return reinterpret_cast<std::uintptr_t>(address);
}

}  // namespace

const char* to_string(CallState state) {
  switch (state) {
    case CallState::kBegun:
      return "begun";
    case CallState::kWaiting:
      return "waiting";
    case CallState::kDone:
      return "done";
    case CallState::kFailed:
      return "failed";
  }
  return "";
}

std::uint64_t FlightRecord::begin(const Signature& signature, std::int64_t position) {
  FlightEntry entry;
  entry.signature = signature;
  entry.position = position;
  // Before the lock, since to unwind the stack takes longer than all else here.
  entry.num_frames = ::backtrace(entry.frames.data(), FlightEntry::kFrames);
  entry.begun = entry.since = FlightEntry::Clock::now();
  const std::lock_guard lock(mutex_);
  entries_[count_ % kCalls] = entry;
  return count_++;
}

void FlightRecord::set(std::uint64_t ticket, CallState state) {
  const auto now = FlightEntry::Clock::now();
  const std::lock_guard lock(mutex_);
  // A later call has the place by now.
  if (ticket + kCalls < count_) return;
  FlightEntry& entry = entries_[ticket % kCalls];
  entry.state = state;
  entry.since = now;
}

std::vector<FlightEntry> FlightRecord::last() const {
  const std::lock_guard lock(mutex_);
  std::vector<FlightEntry> result;
  for (std::uint64_t i = count_ < kCalls ? 0 : count_ - kCalls; i < count_; ++i) {
    result.push_back(entries_[i % kCalls]);
  }
  return result;
}

std::vector<std::string> name_frames(const FlightEntry& entry) {
  Dl_info own{};
  ::dladdr(reinterpret_cast<const void*>(&to_string), &own);
  std::vector<std::string> names;
  bool met_ours = false;
  for (int i = 0; i < entry.num_frames; ++i) {
    // One byte back: the return address may belong to what comes after the call.
    const void* const address = static_cast<const char*>(entry.frames[static_cast<std::size_t>(i)]) - 1;
    Dl_info found{};
    const bool has_name = ::dladdr(address, &found) != 0 && found.dli_fname != nullptr;
    // Cohort's own frames come first, and a reader looks for whoever called it.
    if (names.empty() && has_name && own.dli_fbase == found.dli_fbase) {
      met_ours = true;
      continue;
    }
    if (!met_ours) continue;  // backtrace() itself, where a sanitizer has its own
    if (!has_name) {
      names.push_back(hexadecimal(number(address)));
      continue;
    }
    const std::string object = std::filesystem::path(found.dli_fname).filename().string();
    const std::string place = object + "+" + hexadecimal(number(address) - number(found.dli_fbase));
    if (found.dli_sname == nullptr) {
      names.push_back(place);
    } else {
      names.push_back(demangled(found.dli_sname) + "+" +
                      hexadecimal(number(address) - number(found.dli_saddr)) + " (" + place + ")");
    }
  }
  return names;
}

}  // namespace cohort::comm
