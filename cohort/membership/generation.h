#pragma once

#include <cstdint>
#include <string>
#include <vector>

/// What the agents of a run agree on: numbered generations of members. No LibTorch.
///
///     const membership::Generation& generation = record.generation;
///     for (const MemberInfo& member : generation.members) start(member.id, member.num_processes);
///     const membership::VirtualBlock block = generation.block(process);  // virtual ranks of a process
namespace cohort::membership {

/// Number of an agent in a run, from 1. An agent keeps it, and no other agent gets it later.
using MemberId = std::uint64_t;

/// The most ranks that an agent may start.
inline constexpr int kMaxProcesses = 16'384;

/// An agent, as the record has it.
struct MemberInfo {
  MemberId id = 0;
  std::string incarnation;  ///< of the agent's process; no other process has it
  std::string address;      ///< where its node listens
  int num_processes = 1;    ///< ranks that it starts

  bool operator==(const MemberInfo&) const = default;
};

/// Virtual ranks `first`, ..., `end` - 1.
struct VirtualBlock {
  int first = 0, end = 0;

  bool operator==(const VirtualBlock&) const = default;
};

/// A set of members that make steps together. One number has one content, on all agents.
struct Generation {
  std::uint64_t number = 0;  ///< 0: there was none yet
  /// All members of the generation before it are in it, or leave by notice: they may finish their step first.
  bool is_planned = false;
  std::vector<MemberInfo> members;    ///< by id
  int virtual_ranks = 0;              ///< of the run; 0: it has none
  std::uint64_t committed_steps = 0;  ///< so many steps were committed, by what members had reported
  std::string store;                  ///< address of the generation's key-value store
  std::string cause;                  ///< why it came to be: "agent 3 at n3:29400 died"
  /// Agents that are gone were heard for the last time so many ms before it was decided; 0: none is gone. The
  /// most of them.
  std::uint64_t detect_ms = 0;

  /// Number of ranks of all members.
  int num_processes() const;
  /// The member with this id, or nullptr.
  const MemberInfo* find(MemberId id) const;
  /// Rank of the first process of a member: processes are numbered by member, without holes.
  /// Throws: UsageError where the agent is no member.
  int first_process(MemberId id) const;
  /// The generation as an agent tells it to its ranks: `known_steps` have been committed by them so far, also
  /// by those that died. The generation before may have made steps after this one was agreed on. A rank that
  /// follows one that died learns by them that its state is lost.
  Generation for_ranks(std::uint64_t known_steps) const;
  /// Virtual ranks of a process. It may have none.
  VirtualBlock block(int process) const;

  bool operator==(const Generation&) const = default;
};

}  // namespace cohort::membership
