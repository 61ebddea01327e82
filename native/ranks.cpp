#include "ranks.h"

#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>

namespace tokenmill {

namespace {

using Clock = std::chrono::steady_clock;

// A sleeper wakes this often to see whether those it waits for are still there.
constexpr int64_t NAP = 100'000'000;
constexpr int LOOKS = 32;  // at the number, for each look at the clock

int64_t now() { return Clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }

// Not the private kind: the word is seen by several processes at different addresses.
void sleep_while(std::atomic<uint32_t>& number, uint32_t value, int64_t nanoseconds) {
  const timespec span = {nanoseconds / 1'000'000'000, nanoseconds % 1'000'000'000};
  syscall(SYS_futex, &number, FUTEX_WAIT, value, &span, nullptr, 0);
}

void wake(Signal& signal) {
  if (signal.sleepers.load() > 0) syscall(SYS_futex, &signal.number, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void change(Signal& signal, uint32_t number) {
  signal.number.store(number);
  wake(signal);
}

}  // namespace

static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4);

Ranks::Ranks(RanksMemory* memory, int rank, int size, int64_t spin, int64_t timeout, std::vector<int> peers)
    : memory_(memory), rank_(rank), size_(size), spin_(spin), timeout_(timeout), peers_(std::move(peers)) {}

Wait Ranks::meet_within(int64_t timeout) {
  if (rank_that_gave_up() >= 0) return last_meeting_ = Wait::given_up;
  const uint32_t before = meetings_++;
  if (memory_->arrived.fetch_add(1) + 1 < static_cast<uint32_t>(size_)) {
    return last_meeting_ = wait_while(memory_->met, before, timeout);
  }
  // The last one: nobody comes to the next meeting before this one is over.
  memory_->arrived.store(0);
  change(memory_->met, before + 1);
  return last_meeting_ = Wait::over;
}

bool Ranks::is_behind(uint32_t most) const {
  const auto* others = memory_->taken + 1;
  return std::any_of(others, others + size_ - 1, [&](const auto& taken) { return posts_ - taken.load() > most; });
}

Wait Ranks::wait_taken(uint32_t most) {
  const int64_t end = now() + timeout_;
  for (;;) {
    const uint32_t takes = memory_->takes.number.load();
    if (!is_behind(most)) return Wait::over;
    const Wait outcome = wait_while(memory_->takes, takes, end - now());
    if (outcome != Wait::over) return outcome;
  }
}

void Ranks::post() { change(memory_->posts, ++posts_); }

Wait Ranks::wait_post(int64_t timeout) { return wait_while(memory_->posts, posts_, timeout); }

void Ranks::take() {
  memory_->taken[rank_].store(++posts_);
  memory_->takes.number.fetch_add(1);
  wake(memory_->takes);
}

void Ranks::give_up() {
  uint32_t nobody = 0;
  memory_->given_up.compare_exchange_strong(nobody, static_cast<uint32_t>(rank_) + 1);
}

Wait Ranks::wait_while(Signal& signal, uint32_t number, int64_t timeout) const {
  const int64_t start = now();
  while (true) {
    for (int i = 0; i < LOOKS; ++i) {
      if (signal.number.load() != number) return Wait::over;
      __builtin_ia32_pause();
    }
    if (now() - start >= std::min(spin_, timeout)) break;
  }
  signal.sleepers.fetch_add(1);
  Wait outcome = Wait::over;
  while (signal.number.load() == number && outcome == Wait::over) {
    const int64_t left = start + timeout - now();
    if (left <= 0) {
      outcome = Wait::timeout;
    } else {
      sleep_while(signal.number, number, std::min(left, NAP));
      if (signal.number.load() == number) outcome = trouble();
    }
  }
  signal.sleepers.fetch_sub(1);
  return outcome;
}

Wait Ranks::trouble() const {
  if (rank_that_gave_up() >= 0) return Wait::given_up;
  std::vector<pollfd> peers;
  for (const int peer : peers_) peers.push_back({peer, POLLIN, 0});
  return !peers.empty() && poll(peers.data(), peers.size(), 0) > 0 ? Wait::gone : Wait::over;
}

}  // namespace tokenmill
