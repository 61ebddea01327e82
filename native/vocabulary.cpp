#include "vocabulary.h"

#include <array>
#include <cstring>
#include <stdexcept>

namespace tokenmill {

namespace {

constexpr uint64_t ODD = 0x9E3779B97F4A7C15ull, OTHER = 0xD6E8FEB86659FD93ull;

uint64_t mix(uint64_t a, uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

bool is_power_of_two(uint64_t number) { return number && !(number & (number - 1)); }

}  // namespace

uint64_t hash_spelling(std::string_view spelling) {
  const char* data = spelling.data();
  size_t left = spelling.size();
  uint64_t state = ODD ^ left;
  for (; left >= 8; left -= 8, data += 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    state = mix(state ^ word, OTHER);
  }
  uint64_t word = 0;
  std::memcpy(&word, data, left);
  return mix(state ^ word, OTHER);
}

uint64_t hash_pair(uint32_t left, uint32_t right) { return mix((uint64_t{left} << 32 | right) ^ OTHER, ODD); }

size_t character_bytes(uint8_t first) { return first < 0xC0 ? 1 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4; }

uint32_t checksum_of(const uint8_t* data, size_t size) {
  std::array<uint64_t, 4> lanes{1, 2, 3, 4};
  size_t at = 0;
  for (; at + 32 <= size; at += 32) {
    uint64_t words[4];
    std::memcpy(words, data + at, 32);
    for (int lane = 0; lane < 4; ++lane) lanes[lane] = mix(lanes[lane] ^ words[lane], OTHER) + ODD;
  }
  uint64_t state = size;
  for (; at < size; ++at) state = mix(state ^ data[at], ODD) + 1;
  for (const uint64_t lane : lanes) state = mix(state ^ lane, OTHER);
  return static_cast<uint32_t>(state ^ state >> 32);
}

void append_byte_letter(uint8_t byte, std::string& text) {
  static const auto letters = [] {
    std::array<uint16_t, 256> made{};
    uint16_t next = 256;
    for (int code = 0; code < 256; ++code) {
      const bool is_printable = (code >= 33 && code <= 126) || (code >= 161 && code <= 172) || code >= 174;
      made[code] = is_printable ? code : next++;
    }
    return made;
  }();
  const uint16_t code = letters[byte];
  if (code < 0x80) {
    text.push_back(static_cast<char>(code));
  } else {
    text.push_back(static_cast<char>(0xC0 | code >> 6));
    text.push_back(static_cast<char>(0x80 | (code & 0x3F)));
  }
}

template <class T>
const T* Vocabulary::section(uint64_t begin, uint64_t count) const {
  const uint64_t end = header_->end;
  if (begin % alignof(T) || begin > end || count > (end - begin) / sizeof(T)) {
    throw std::invalid_argument("a section lies outside the file");
  }
  return reinterpret_cast<const T*>(data_ + begin);
}

Vocabulary::Vocabulary(const uint8_t* data, size_t size)
    : data_(data), header_(reinterpret_cast<const VocabularyHeader*>(data)) {
  if (size < sizeof(VocabularyHeader) || std::memcmp(header_->magic, "TMVOCAB\n", 8) != 0) {
    throw std::invalid_argument("it is no vocabulary");
  }
  if (header_->version != VOCABULARY_VERSION) throw std::invalid_argument("it is of another version");
  if (header_->num_bytes != size || header_->end > size || header_->notes > header_->end) {
    throw std::invalid_argument("its size is not what it says");
  }
  if (!is_power_of_two(header_->spelling_slots) || !is_power_of_two(header_->merge_slots)) {
    throw std::invalid_argument("its tables have no size");
  }
  starts_ = section<uint32_t>(header_->starts, uint64_t{header_->num_ids} + 1);
  flags_ = section<uint8_t>(header_->flags, header_->num_ids);
  characters_ = section<uint32_t>(header_->characters, SHORT_CHARACTERS);
  bytes_ = section<uint32_t>(header_->bytes, 256);
  cuts_ = section<uint8_t>(header_->cuts, 256);
  spellings_ = section<SpellingSlot>(header_->spelling_table, header_->spelling_slots);
  merges_ = section<MergeSlot>(header_->merge_table, header_->merge_slots);
}

bool Vocabulary::is_unchanged() const {
  constexpr size_t behind = sizeof(VocabularyHeader);
  return checksum_of(data_ + behind, header_->num_bytes - behind) == header_->checksum;
}

std::string_view Vocabulary::spelling(uint32_t id) const {
  if (id >= header_->num_ids) return {};
  const uint64_t begin = header_->spellings + starts_[id], end = header_->spellings + starts_[id + 1];
  return begin <= end && end <= header_->end ? span(begin, end) : std::string_view{};
}

uint32_t Vocabulary::find(std::string_view wanted, uint8_t flag) const {
  const uint64_t hash = hash_spelling(wanted);
  const uint32_t last = header_->spelling_slots - 1, tag = static_cast<uint32_t>(hash >> 32);
  uint32_t at = static_cast<uint32_t>(hash) & last;
  for (uint32_t looks = 0; looks <= last; ++looks, at = (at + 1) & last) {
    const SpellingSlot slot = spellings_[at];
    if (slot.id == ABSENT) break;
    if (slot.tag == tag && spelling(slot.id) == wanted) return flags(slot.id) & flag ? slot.id : ABSENT;
  }
  return ABSENT;
}

uint32_t Vocabulary::character(std::string_view character) const {
  const auto first = static_cast<uint8_t>(character[0]);
  if (first < 0x80) return characters_[first];
  if (character.size() == 2) return characters_[(first & 0x1F) << 6 | (character[1] & 0x3F)];
  return find(character, IN_MODEL);
}

const MergeSlot* Vocabulary::merge(uint32_t left, uint32_t right) const {
  const uint32_t last = header_->merge_slots - 1;
  uint32_t at = static_cast<uint32_t>(hash_pair(left, right)) & last;
  for (uint32_t looks = 0; looks <= last; ++looks, at = (at + 1) & last) {
    const MergeSlot& slot = merges_[at];
    if (slot.left == left && slot.right == right) return &slot;
    if (slot.left == ABSENT) break;
  }
  return nullptr;
}

}  // namespace tokenmill
