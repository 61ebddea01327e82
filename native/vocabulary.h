// A tokenizer's vocabulary as flat arrays in a mapped file, and byte-pair encoding over them.
//
//   |header|starts of spellings|spellings|flags|ids of short characters|cuts|hash of spellings|hash of merges|notes|
//
// Opening it parses nothing. What the arrays say is checked where it is used: a damaged file gives wrong tokens at
// worst, never memory that is not its own.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace tokenmill {

constexpr uint32_t ABSENT = 0xFFFFFFFFu;
constexpr uint32_t VOCABULARY_VERSION = 1;
// Code points whose tokens are found without the hash.
constexpr uint32_t SHORT_CHARACTERS = 0x800;
// SentencePiece's mark of a space, U+2581.
constexpr std::string_view MARK = "\xE2\x96\x81";

enum TokenFlag : uint8_t { IN_MODEL = 1, IS_ADDED = 2, IS_SPECIAL = 4 };
enum ModelOption : uint32_t { BYTE_FALLBACK = 1, FUSES_UNKNOWN = 2, IGNORES_MERGES = 4 };

struct SpellingSlot {
  uint32_t id, tag;  // id ABSENT: free
};

struct MergeSlot {
  uint32_t left, right, rank, joint;  // left ABSENT: free
};

struct VocabularyHeader {
  char magic[8];
  uint32_t version, checksum;  // of what follows the header
  uint64_t num_bytes;
  uint32_t num_ids, num_tokens, longest, options;
  uint32_t unknown, spelling_slots, merge_slots, padding;  // powers of two
  uint64_t starts, spellings, flags, characters, bytes, cuts, spelling_table, merge_table, notes, end;
};

uint64_t hash_spelling(std::string_view spelling);
uint64_t hash_pair(uint32_t left, uint32_t right);
// The number of bytes of the character that a byte begins.
size_t character_bytes(uint8_t first);

class Vocabulary {
 public:
  // Throws std::invalid_argument unless the header and all sections fit the memory.
  Vocabulary(const uint8_t* data, size_t size);

  const VocabularyHeader& header() const { return *header_; }
  bool is_unchanged() const;
  std::string_view notes() const { return span(header_->notes, header_->end); }
  std::string_view spelling(uint32_t id) const;
  uint8_t flags(uint32_t id) const { return id < header_->num_ids ? flags_[id] : 0; }
  // ABSENT: there is no such token, or `flag` is not set for it.
  uint32_t find(std::string_view spelling, uint8_t flag = IN_MODEL | IS_ADDED) const;
  uint32_t character(std::string_view character) const;
  uint32_t byte(uint8_t byte) const { return bytes_[byte]; }
  const MergeSlot* merge(uint32_t left, uint32_t right) const;
  // True if a space's mark can begin a piece of its own after this byte: no merge joins them.
  bool cuts_after(uint8_t byte) const { return cuts_[byte] != 0; }
  bool has(ModelOption option) const { return (header_->options & option) != 0; }
  uint32_t unknown() const { return header_->unknown; }

 private:
  std::string_view span(uint64_t begin, uint64_t end) const {
    return {reinterpret_cast<const char*>(data_) + begin, end - begin};
  }
  template <class T>
  const T* section(uint64_t begin, uint64_t count) const;

  const uint8_t* data_;
  const VocabularyHeader* header_;
  const uint32_t* starts_;
  const uint8_t* flags_;
  const uint32_t* characters_;
  const uint32_t* bytes_;
  const uint8_t* cuts_;
  const SpellingSlot* spellings_;
  const MergeSlot* merges_;
};

// Byte-pair encoding of pieces of text, for any number of threads.
class PairEncoder {
 public:
  explicit PairEncoder(const Vocabulary& vocabulary);
  // Append the tokens of a piece, which is spelled as the vocabulary spells its tokens.
  void encode(std::string_view piece, std::vector<uint32_t>& ids) const;

 private:
  // True if no merge can join what precedes a space's mark with it.
  bool can_cut(std::string_view piece, size_t at) const;
  void encode_word(std::string_view word, std::vector<uint32_t>& ids) const;
  void join(std::string_view word, std::vector<uint32_t>& ids) const;
  void split(std::string_view word, std::vector<uint32_t>& symbols) const;
  bool add_bytes(std::string_view character, std::vector<uint32_t>& symbols) const;
  void join_few(std::vector<uint32_t>& symbols) const;
  void join_many(std::vector<uint32_t>& symbols) const;
  bool is_whole(uint32_t id) const;

  const Vocabulary& vocabulary_;
  bool cuts_words_;
  // Of each token, whether its own spelling is encoded as itself: found out when it is first needed.
  mutable std::unique_ptr<std::atomic<uint8_t>[]> whole_;
};

// How text is spelled in a vocabulary.
enum class Spelling { PLAIN, BYTES, MARKS };
enum class Prefix { NONE, ALWAYS, UNLESS_THERE, AT_START };

// So many entries of a hash table are fetched ahead: they are far apart.
constexpr size_t AHEAD = 16;

// A vocabulary's file, in the making.
class VocabularyBuilder {
 public:
  // JSON: an object of ids by spelling.
  void read_tokens(std::string_view json);
  // JSON: a list of pairs, or of pairs joined by a space.
  void read_merges(std::string_view json);
  // Every cut of a token into two becomes a merge, by falling scores of what it joins, then by the ids of the two; where
  // all three are marked.
  void add_scored_merges(const double* scores, const uint8_t* marks);
  // The two as read_tokens and read_merges read them.
  std::string tokens_json() const;
  std::string merges_json() const;
  void add(uint32_t id, std::string_view spelling, uint8_t flags);
  void add_merge(std::string_view left, std::string_view right);
  uint32_t find(std::string_view spelling) const;
  size_t num_tokens() const { return num_tokens_; }
  std::string finish(uint32_t options, uint32_t unknown, std::string_view notes);

 private:
  struct Token {
    uint64_t begin = 0;
    uint32_t size = 0;
    uint8_t flags = 0;
  };
  struct Merge {
    uint32_t left, right, joint;
  };
  std::string_view spelling(const Token& token) const { return {text_.data() + token.begin, token.size}; }
  // A token in two: one that begins it, and the rest, which may be a token.
  struct Cut {
    uint32_t left, joint;
    uint64_t hash;  // of the rest
  };
  uint32_t find(std::string_view spelling, uint64_t hash) const;
  std::vector<Merge> find_rights(const std::vector<Cut>& cuts, const uint8_t* marks) const;
  void insert(uint32_t id);
  void grow();
  // Append merges, in the order of add_scored_merges; counts: of each token, how many join into it.
  void sort_by_scores(const std::vector<Merge>& found, std::vector<uint32_t>& counts, const double* scores);
  std::vector<MergeSlot> merge_table() const;
  std::vector<uint8_t> cuts() const;

  std::string text_;
  std::vector<Token> tokens_;
  std::vector<SpellingSlot> table_;
  std::vector<Merge> merges_;
  size_t num_tokens_ = 0;
};

uint32_t checksum_of(const uint8_t* data, size_t size);
// The two bytes of UTF-8, or the one, that stand for a byte in GPT-2's alphabet.
void append_byte_letter(uint8_t byte, std::string& text);

}  // namespace tokenmill
