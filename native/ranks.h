// Ranks: processes that run one model together, and what they wait for in memory that all of them map.
//
// A rank meets the others (a barrier), or waits for a post: rank 0 posts messages in slots of a ring, which the others
// take. Whoever waits looks for a moment, because ranks that run side by side are microseconds apart, and then sleeps
// (futex), so that more ranks than cores take turns instead of burning the time of the one they wait for. No wait is
// without an end: it has a deadline, and it ends when a rank has given up, or is gone.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "meeting.h"

namespace tokenmill {

// A number that others wait to see changed, on a cache line of its own.
struct alignas(64) Signal {
  std::atomic<uint32_t> number;
  std::atomic<uint32_t> sleepers;
};

constexpr int MOST_RANKS = 64;

// What the ranks share; zeros at first.
struct RanksMemory {
  Signal met;    // how often all have met
  Signal posts;  // messages that rank 0 has posted
  Signal takes;  // how often a message has been taken, by all ranks together
  alignas(64) std::atomic<uint32_t> taken[MOST_RANKS];  // messages that each rank has taken
  alignas(64) std::atomic<uint32_t> arrived;   // ranks that have come to the next meeting
  alignas(64) std::atomic<uint32_t> given_up;  // 1 + the rank that gave up first; 0: none has
};

enum class Wait : int { over = 0, timeout = 1, given_up = 2, gone = 3 };

class Ranks : public Meeting {
 public:
  // `spin` and `timeout` in nanoseconds; `peers`: descriptors that can be read once a peer is gone (pidfd).
  Ranks(RanksMemory* memory, int rank, int size, int64_t spin, int64_t timeout, std::vector<int> peers);

  bool meet() override { return meet_within(timeout_) == Wait::over; }
  Wait meet_within(int64_t timeout);
  Wait last_meeting() const { return last_meeting_; }

  // Rank 0: wait until no rank has more than `most` posts to take; then post what was written.
  Wait wait_taken(uint32_t most);
  void post();
  // Another rank: wait for the next post; then say that it is read.
  Wait wait_post(int64_t timeout);
  void take();

  // Nobody waits for this rank any more, nor for any other.
  void give_up();
  int rank_that_gave_up() const { return static_cast<int>(memory_->given_up.load()) - 1; }

 private:
  RanksMemory* memory_;
  int rank_, size_;
  int64_t spin_, timeout_;
  std::vector<int> peers_;
  uint32_t meetings_ = 0, posts_ = 0;
  Wait last_meeting_ = Wait::over;

  bool is_behind(uint32_t most) const;
  Wait wait_while(Signal& signal, uint32_t number, int64_t timeout) const;
  Wait trouble() const;
};

}  // namespace tokenmill
