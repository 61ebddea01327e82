// Byte-pair encoding: neighbours are joined by rising rank, of equal ones the leftmost first.
#include <algorithm>
#include <functional>
#include <queue>

#include "vocabulary.h"

namespace tokenmill {

namespace {

// Up to here looking through all ranks is faster than a heap.
constexpr size_t FEW = 40;
// The longest word that is looked up as a token first.
constexpr size_t LONG_WORD = 64;
constexpr uint32_t NEVER = ABSENT;
enum : uint8_t { UNKNOWN_YET, WHOLE, IN_PARTS };

// Symbols of a long word in a list, with the rank of each one's pair with the next.
struct Chain {
  std::vector<uint32_t> next, previous, ranks, joints;
};

}  // namespace

PairEncoder::PairEncoder(const Vocabulary& vocabulary)
    : vocabulary_(vocabulary),
      cuts_words_(vocabulary.find(MARK, IN_MODEL) != ABSENT),
      whole_(new std::atomic<uint8_t>[vocabulary.header().num_ids]()) {}

void PairEncoder::encode(std::string_view piece, std::vector<uint32_t>& ids) const {
  if (vocabulary_.has(IGNORES_MERGES)) {
    const uint32_t id = vocabulary_.find(piece, IN_MODEL);
    if (id != ABSENT) return ids.push_back(id);
  }
  if (!cuts_words_) return encode_word(piece, ids);
  size_t begin = 0;
  for (size_t at = piece.find(MARK, 1); at != piece.npos; at = piece.find(MARK, at + MARK.size())) {
    if (!can_cut(piece, at)) continue;
    encode_word(piece.substr(begin, at - begin), ids);
    begin = at;
  }
  encode_word(piece.substr(begin), ids);
}

bool PairEncoder::can_cut(std::string_view piece, size_t at) const {
  if (!vocabulary_.cuts_after(static_cast<uint8_t>(piece[at - 1]))) return false;
  size_t begin = at - 1;
  while (begin > 0 && (piece[begin] & 0xC0) == 0x80) --begin;
  return vocabulary_.character(piece.substr(begin, at - begin)) != ABSENT;  // else its symbols may end otherwise
}

void PairEncoder::encode_word(std::string_view word, std::vector<uint32_t>& ids) const {
  if (word.size() <= LONG_WORD) {
    const uint32_t id = vocabulary_.find(word, IN_MODEL);
    if (id != ABSENT && is_whole(id)) return ids.push_back(id);
  }
  join(word, ids);
}

bool PairEncoder::is_whole(uint32_t id) const {
  uint8_t state = whole_[id].load(std::memory_order_relaxed);
  if (state == UNKNOWN_YET) {
    std::vector<uint32_t> own;
    join(vocabulary_.spelling(id), own);
    state = own.size() == 1 && own[0] == id ? WHOLE : IN_PARTS;
    whole_[id].store(state, std::memory_order_relaxed);
  }
  return state == WHOLE;
}

void PairEncoder::join(std::string_view word, std::vector<uint32_t>& ids) const {
  static thread_local std::vector<uint32_t> symbols;
  symbols.clear();
  split(word, symbols);
  if (symbols.size() > FEW) {
    join_many(symbols);
  } else if (symbols.size() > 1) {
    join_few(symbols);
  }
  ids.insert(ids.end(), symbols.begin(), symbols.end());
}

void PairEncoder::split(std::string_view word, std::vector<uint32_t>& symbols) const {
  const uint32_t unknown = vocabulary_.unknown();
  bool waits = false;  // an unknown token is put down before the next known character
  for (size_t at = 0; at < word.size();) {
    const size_t size = std::min(character_bytes(static_cast<uint8_t>(word[at])), word.size() - at);
    const std::string_view character = word.substr(at, size);
    at += size;
    const uint32_t id = vocabulary_.character(character);
    if (id != ABSENT) {
      if (waits) symbols.push_back(unknown);
      waits = false;
      symbols.push_back(id);
    } else if (!add_bytes(character, symbols) && unknown != ABSENT) {
      if (waits && !vocabulary_.has(FUSES_UNKNOWN)) symbols.push_back(unknown);
      waits = true;
    }
  }
  if (waits) symbols.push_back(unknown);
}

bool PairEncoder::add_bytes(std::string_view character, std::vector<uint32_t>& symbols) const {
  if (!vocabulary_.has(BYTE_FALLBACK)) return false;
  const size_t before = symbols.size();
  for (const char byte : character) {
    const uint32_t id = vocabulary_.byte(static_cast<uint8_t>(byte));
    if (id == ABSENT) {
      symbols.resize(before);
      return false;
    }
    symbols.push_back(id);
  }
  return true;
}

void PairEncoder::join_few(std::vector<uint32_t>& symbols) const {
  uint32_t ranks[FEW], joints[FEW];
  size_t count = symbols.size();
  const auto look = [&](size_t at) {
    const MergeSlot* merge = vocabulary_.merge(symbols[at], symbols[at + 1]);
    ranks[at] = merge ? merge->rank : NEVER;
    joints[at] = merge ? merge->joint : ABSENT;
  };
  for (size_t at = 0; at + 1 < count; ++at) look(at);
  while (count > 1) {
    const size_t best = std::min_element(ranks, ranks + count - 1) - ranks;
    if (ranks[best] == NEVER) break;
    symbols[best] = joints[best];
    --count;
    for (size_t at = best + 1; at < count; ++at) symbols[at] = symbols[at + 1];
    for (size_t at = best + 1; at + 1 < count; ++at) ranks[at] = ranks[at + 1], joints[at] = joints[at + 1];
    if (best > 0) look(best - 1);
    if (best + 1 < count) look(best);
  }
  symbols.resize(count);
}

void PairEncoder::join_many(std::vector<uint32_t>& symbols) const {
  const auto count = static_cast<uint32_t>(symbols.size());
  Chain chain{std::vector<uint32_t>(count), std::vector<uint32_t>(count), std::vector<uint32_t>(count, NEVER),
              std::vector<uint32_t>(count)};
  std::vector<uint64_t> begun;
  begun.reserve(count);
  const auto look = [&](uint32_t at) {
    const MergeSlot* merge = vocabulary_.merge(symbols[at], symbols[chain.next[at]]);
    chain.ranks[at] = merge ? merge->rank : NEVER;
    if (merge) chain.joints[at] = merge->joint;
    return merge != nullptr;
  };
  const auto order = [&](uint32_t at) { return uint64_t{chain.ranks[at]} << 32 | at; };
  for (uint32_t at = 0; at < count; ++at) chain.next[at] = at + 1, chain.previous[at] = at - 1;
  for (uint32_t at = 0; at + 1 < count; ++at) {
    if (look(at)) begun.push_back(order(at));
  }
  std::priority_queue<uint64_t, std::vector<uint64_t>, std::greater<>> queue(std::greater<>(), std::move(begun));
  while (!queue.empty()) {
    const auto at = static_cast<uint32_t>(queue.top());
    const bool is_current = queue.top() == order(at);  // else its pair has changed since
    queue.pop();
    if (!is_current) continue;
    const uint32_t gone = chain.next[at], after = chain.next[gone], before = chain.previous[at];
    symbols[at] = chain.joints[at];
    symbols[gone] = ABSENT;
    chain.ranks[gone] = chain.ranks[at] = NEVER;
    chain.next[at] = after;
    if (after < count) {
      chain.previous[after] = at;
      if (look(at)) queue.push(order(at));
    }
    if (before < count && look(before)) queue.push(order(before));
  }
  symbols.erase(std::remove(symbols.begin(), symbols.end(), ABSENT), symbols.end());
}

}  // namespace tokenmill
