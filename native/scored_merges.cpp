// The merges of a vocabulary with scores, as SentencePiece has them: every cut of a token into two others.
#include <algorithm>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "vocabulary.h"

namespace tokenmill {

namespace {

// The first eight bytes as a number that sorts as they do.
uint64_t first_bytes(std::string_view text) {
  uint64_t number = 0;
  for (size_t at = 0; at < 8; ++at) number = number << 8 | (at < text.size() ? static_cast<uint8_t>(text[at]) : 0);
  return number;
}

}  // namespace

void VocabularyBuilder::add_scored_merges(const double* scores, const uint8_t* marks) {
  struct Word {
    uint64_t head;  // its first bytes, which most comparisons end at
    uint32_t id;
  };
  std::vector<Word> words;
  words.reserve(tokens_.size());
  for (uint32_t id = 0; id < tokens_.size(); ++id) {
    if (scores[id] != scores[id]) throw std::invalid_argument("a score is not a number");
    if (marks[id] && tokens_[id].size) words.push_back({first_bytes(spelling(tokens_[id])), id});
  }
  // Where tokens are sorted, those that begin one are the last ones that began its neighbours.
  std::sort(words.begin(), words.end(), [&](const Word& a, const Word& b) {
    return a.head != b.head ? a.head < b.head : spelling(tokens_[a.id]) < spelling(tokens_[b.id]);
  });
  std::vector<Cut> candidates;
  std::vector<uint32_t> begins;
  for (const Word& word : words) {
    const std::string_view text = spelling(tokens_[word.id]);
    while (!begins.empty() && text.substr(0, tokens_[begins.back()].size) != spelling(tokens_[begins.back()])) {
      begins.pop_back();
    }
    for (const uint32_t left : begins) {
      candidates.push_back({left, word.id, hash_spelling(text.substr(tokens_[left].size))});
    }
    begins.push_back(word.id);
  }
  std::vector<uint32_t> counts(tokens_.size() + 1);
  std::vector<Merge> found = find_rights(candidates, marks);
  for (const Merge& merge : found) ++counts[merge.joint];
  sort_by_scores(found, counts, scores);
}

std::vector<VocabularyBuilder::Merge> VocabularyBuilder::find_rights(const std::vector<Cut>& cuts,
                                                                     const uint8_t* marks) const {
  const size_t last = table_.size() - 1;
  std::vector<Merge> found;
  found.reserve(cuts.size());
  for (size_t at = 0; at < cuts.size(); ++at) {
    if (at + AHEAD < cuts.size()) __builtin_prefetch(&table_[static_cast<uint32_t>(cuts[at + AHEAD].hash) & last]);
    const Cut& cut = cuts[at];
    const uint32_t right = find(spelling(tokens_[cut.joint]).substr(tokens_[cut.left].size), cut.hash);
    if (right != ABSENT && marks[right]) found.push_back({cut.left, right, cut.joint});
  }
  return found;
}

// Tokens are sorted by their scores and have their merges' places counted, since merges are twice as many.
void VocabularyBuilder::sort_by_scores(const std::vector<Merge>& found, std::vector<uint32_t>& counts,
                                       const double* scores) {
  std::vector<uint32_t> joints;
  for (uint32_t id = 0; id < tokens_.size(); ++id) {
    if (counts[id]) joints.push_back(id);
  }
  std::stable_sort(joints.begin(), joints.end(), [&](uint32_t a, uint32_t b) { return scores[a] > scores[b]; });
  uint32_t place = 0;
  for (const uint32_t joint : joints) place += std::exchange(counts[joint], place);
  const size_t before = merges_.size();
  merges_.resize(before + found.size());
  Merge* const merges = merges_.data() + before;
  for (const Merge& merge : found) merges[counts[merge.joint]++] = merge;
  // Now a count is where the merges of a token end. Those of equal scores are in one order.
  for (size_t first = 0, last = 0; first < joints.size(); first = last) {
    const uint32_t begin = first ? counts[joints[first - 1]] : 0;
    while (last < joints.size() && scores[joints[last]] == scores[joints[first]]) ++last;
    std::sort(merges + begin, merges + counts[joints[last - 1]], [](const Merge& a, const Merge& b) {
      return std::tie(a.left, a.right) < std::tie(b.left, b.right);
    });
  }
}

}  // namespace tokenmill
