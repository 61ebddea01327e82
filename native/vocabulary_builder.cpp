// Builds the file of a vocabulary from the parts of a tokenizer.json, or from a list of tokens with scores.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "vocabulary.h"

namespace tokenmill {

namespace {

[[noreturn]] void refuse(const char* reason) { throw std::invalid_argument(reason); }

// Just enough JSON for a vocabulary: strings, whole numbers, and the marks between them.
class Json {
 public:
  explicit Json(std::string_view text) : at_(text.data()), end_(text.data() + text.size()) {}

  void expect(char mark) {
    if (!takes(mark)) refuse("the JSON of the vocabulary is not as expected");
  }
  bool takes(char mark) {
    if (peek() != mark) return false;
    ++at_;
    return true;
  }
  char peek() {
    while (at_ < end_ && (*at_ == ' ' || *at_ == '\n' || *at_ == '\t' || *at_ == '\r')) ++at_;
    return at_ < end_ ? *at_ : '\0';
  }
  uint32_t number() {
    peek();
    uint64_t value = 0;
    const char* begin = at_;
    for (; at_ < end_ && *at_ >= '0' && *at_ <= '9' && at_ - begin < 10; ++at_) value = value * 10 + (*at_ - '0');
    if (at_ == begin || value >= ABSENT) refuse("an id in the vocabulary is no id");
    return static_cast<uint32_t>(value);
  }
  void string(std::string& text) {
    text.clear();
    expect('"');
    for (; at_ < end_ && *at_ != '"';) {
      const char* plain = at_;
      while (at_ < end_ && *at_ != '"' && *at_ != '\\') ++at_;
      text.append(plain, at_);
      if (at_ < end_ && *at_ == '\\') escape(text);
    }
    expect('"');
  }

 private:
  void escape(std::string& text) {
    static constexpr char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    if (end_ - at_ < 2) refuse("a string of the vocabulary has no end");
    const char name = at_[1];
    at_ += 2;
    if (name == 'u') return append(code_point(), text);
    const char* found = std::strchr(names, name);
    if (!found || !name) refuse("a string of the vocabulary has an unknown escape");
    text.push_back(values[found - names]);
  }
  uint32_t unit() {
    if (end_ - at_ < 4) refuse("a string of the vocabulary has no end");
    uint32_t value = 0;
    for (int digit = 0; digit < 4; ++digit, ++at_) {
      const char one = *at_ | 0x20;
      if (!((one >= '0' && one <= '9') || (one >= 'a' && one <= 'f'))) refuse("a character's number is broken");
      value = value * 16 + (one <= '9' ? one - '0' : one - 'a' + 10);
    }
    return value;
  }
  uint32_t code_point() {
    const uint32_t high = unit();
    if (high < 0xD800 || high > 0xDFFF) return high;
    if (high > 0xDBFF || end_ - at_ < 6 || at_[0] != '\\' || at_[1] != 'u') refuse("half a character");
    at_ += 2;
    const uint32_t low = unit();
    if (low < 0xDC00 || low > 0xDFFF) refuse("half a character");
    return 0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00);
  }
  static void append(uint32_t code, std::string& text) {
    const auto put = [&](uint32_t byte) { text.push_back(static_cast<char>(byte)); };
    if (code < 0x80) return put(code);
    if (code < 0x800) return put(0xC0 | code >> 6), put(0x80 | (code & 0x3F));
    if (code < 0x10000) {
      put(0xE0 | code >> 12);
    } else {
      put(0xF0 | code >> 18);
      put(0x80 | (code >> 12 & 0x3F));
    }
    put(0x80 | (code >> 6 & 0x3F));
    put(0x80 | (code & 0x3F));
  }

  const char* at_;
  const char* end_;
};

size_t table_size(size_t entries) {
  size_t size = 16;
  while (size < 2 * entries) size *= 2;
  return size;
}

size_t count_characters(std::string_view text) {
  return std::count_if(text.begin(), text.end(), [](char byte) { return (byte & 0xC0) != 0x80; });
}

// Sections one behind the other, each at a multiple of 64 bytes.
class Sections {
 public:
  explicit Sections(size_t header) { file_.resize(header); }
  template <class T>
  uint64_t add(const T* data, size_t count) {
    file_.resize((file_.size() + 63) & ~size_t{63});
    const uint64_t begin = file_.size();
    file_.append(reinterpret_cast<const char*>(data), count * sizeof(T));
    return begin;
  }
  std::string& file() { return file_; }

 private:
  std::string file_;
};

}  // namespace

void VocabularyBuilder::read_tokens(std::string_view text) {
  Json json(text);
  std::string spelling;
  text_.reserve(text.size());
  json.expect('{');
  if (json.takes('}')) return;
  do {
    json.string(spelling);
    json.expect(':');
    add(json.number(), spelling, IN_MODEL);
  } while (json.takes(','));
  json.expect('}');
}

void VocabularyBuilder::read_merges(std::string_view text) {
  Json json(text);
  std::string left, right;
  json.expect('[');
  if (json.takes(']')) return;
  do {
    if (json.peek() == '[') {
      json.expect('[');
      json.string(left);
      json.expect(',');
      json.string(right);
      json.expect(']');
      add_merge(left, right);
    } else {
      json.string(left);
      const size_t space = left.find(' ');
      if (space == left.npos || left.find(' ', space + 1) != left.npos) refuse("a merge is not of two tokens");
      add_merge(std::string_view(left).substr(0, space), std::string_view(left).substr(space + 1));
    }
  } while (json.takes(','));
  json.expect(']');
}

void VocabularyBuilder::add(uint32_t id, std::string_view spelling, uint8_t flags) {
  if (id >= 1u << 26) refuse("an id is too large");
  if (id >= tokens_.size()) tokens_.resize(id + 1);
  Token& token = tokens_[id];
  if (token.flags) {
    if (this->spelling(token) != spelling || !(flags & IS_ADDED)) refuse("two tokens have one id");
    token.flags |= flags;
    return;
  }
  if (find(spelling) != ABSENT) refuse("a token has two ids");
  token = {text_.size(), static_cast<uint32_t>(spelling.size()), flags};
  text_.append(spelling);
  ++num_tokens_;
  if (table_.size() < 2 * num_tokens_) {
    grow();
  } else {
    insert(id);
  }
}

void VocabularyBuilder::insert(uint32_t id) {
  const uint64_t hash = hash_spelling(spelling(tokens_[id]));
  const size_t last = table_.size() - 1;
  size_t at = static_cast<uint32_t>(hash) & last;
  while (table_[at].id != ABSENT) at = (at + 1) & last;
  table_[at] = {id, static_cast<uint32_t>(hash >> 32)};
}

void VocabularyBuilder::grow() {
  table_.assign(std::max<size_t>(table_size(num_tokens_) * 2, 1024), {ABSENT, 0});
  for (size_t id = 0; id < tokens_.size(); ++id) {
    if (tokens_[id].flags) insert(static_cast<uint32_t>(id));
  }
}

uint32_t VocabularyBuilder::find(std::string_view wanted) const { return find(wanted, hash_spelling(wanted)); }

uint32_t VocabularyBuilder::find(std::string_view wanted, uint64_t hash) const {
  if (table_.empty()) return ABSENT;
  const size_t last = table_.size() - 1;
  for (size_t at = static_cast<uint32_t>(hash) & last; table_[at].id != ABSENT; at = (at + 1) & last) {
    const uint32_t id = table_[at].id;
    if (table_[at].tag == static_cast<uint32_t>(hash >> 32) && spelling(tokens_[id]) == wanted) return id;
  }
  return ABSENT;
}

void VocabularyBuilder::add_merge(std::string_view left, std::string_view right) {
  const Merge merge{find(left), find(right), find(std::string(left).append(right))};
  for (const uint32_t id : {merge.left, merge.right, merge.joint}) {
    if (id == ABSENT || !(tokens_[id].flags & IN_MODEL)) refuse("a merge is of tokens that are not there");
  }
  merges_.push_back(merge);
}

namespace {

void append_json(std::string_view text, std::string& to) {
  to.push_back('"');
  for (const char byte : text) {
    if (byte == '"' || byte == '\\') {
      to.push_back('\\');
      to.push_back(byte);
    } else if (static_cast<uint8_t>(byte) < 0x20) {
      char escape[8];
      to.append(escape, std::snprintf(escape, sizeof escape, "\\u%04x", byte));
    } else {
      to.push_back(byte);
    }
  }
  to.push_back('"');
}

}  // namespace

std::string VocabularyBuilder::tokens_json() const {
  std::string json = "{";
  json.reserve(text_.size() + 16 * tokens_.size());
  for (size_t id = 0; id < tokens_.size(); ++id) {
    if (!(tokens_[id].flags & IN_MODEL)) continue;
    if (json.size() > 1) json.push_back(',');
    append_json(spelling(tokens_[id]), json);
    json.append(":").append(std::to_string(id));
  }
  return json += "}";
}

std::string VocabularyBuilder::merges_json() const {
  std::string json = "[";
  json.reserve(32 * merges_.size());
  for (const Merge& merge : merges_) {
    json.append(json.size() > 1 ? ",[" : "[");
    append_json(spelling(tokens_[merge.left]), json);
    json.push_back(',');
    append_json(spelling(tokens_[merge.right]), json);
    json.push_back(']');
  }
  return json += "]";
}

std::vector<MergeSlot> VocabularyBuilder::merge_table() const {
  std::vector<MergeSlot> table(table_size(merges_.size()), {ABSENT, ABSENT, ABSENT, ABSENT});
  const size_t last = table.size() - 1;
  const auto slot = [&](const Merge& merge) { return static_cast<uint32_t>(hash_pair(merge.left, merge.right)) & last; };
  for (size_t rank = 0; rank < merges_.size(); ++rank) {
    if (rank + AHEAD < merges_.size()) __builtin_prefetch(&table[slot(merges_[rank + AHEAD])], 1);
    const Merge& merge = merges_[rank];
    size_t at = slot(merge);
    while (table[at].left != ABSENT && !(table[at].left == merge.left && table[at].right == merge.right)) {
      at = (at + 1) & last;
    }
    table[at] = {merge.left, merge.right, static_cast<uint32_t>(rank), merge.joint};
  }
  return table;
}

// After which bytes no merge joins what precedes a space's mark with it.
std::vector<uint8_t> VocabularyBuilder::cuts() const {
  std::vector<uint8_t> cuts(256, 1);
  for (const Merge& merge : merges_) {
    const std::string_view left = spelling(tokens_[merge.left]), right = spelling(tokens_[merge.right]);
    if (!left.empty() && right.substr(0, MARK.size()) == MARK) cuts[static_cast<uint8_t>(left.back())] = 0;
  }
  return cuts;
}

std::string VocabularyBuilder::finish(uint32_t options, uint32_t unknown, std::string_view notes) {
  VocabularyHeader header{};
  std::memcpy(header.magic, "TMVOCAB\n", 8);
  header.version = VOCABULARY_VERSION;
  header.num_ids = static_cast<uint32_t>(tokens_.size());
  header.num_tokens = static_cast<uint32_t>(num_tokens_);
  header.options = options;
  header.unknown = unknown;
  std::vector<uint32_t> starts{0}, characters(SHORT_CHARACTERS, ABSENT), bytes(256, ABSENT);
  std::vector<uint8_t> flags;
  std::string texts;
  for (size_t id = 0; id < tokens_.size(); ++id) {
    const std::string_view text = spelling(tokens_[id]);
    texts.append(text);
    starts.push_back(static_cast<uint32_t>(texts.size()));
    flags.push_back(tokens_[id].flags);
    header.longest = std::max(header.longest, static_cast<uint32_t>(count_characters(text)));
    const bool is_in_model = tokens_[id].flags & IN_MODEL;
    const auto first = text.empty() ? uint8_t{0} : static_cast<uint8_t>(text[0]);
    if (is_in_model && text.size() == 1) characters[first & 0x7F] = static_cast<uint32_t>(id);
    if (is_in_model && text.size() == 2 && first >= 0xC0) {
      characters[(first & 0x1F) << 6 | (text[1] & 0x3F)] = static_cast<uint32_t>(id);
    }
  }
  for (int byte = 0; byte < 256; ++byte) {
    char name[8];
    std::snprintf(name, sizeof name, "<0x%02X>", byte);
    const uint32_t id = find(name);
    if (id != ABSENT && tokens_[id].flags & IN_MODEL) bytes[byte] = id;
  }
  if (table_.empty()) table_.assign(16, {ABSENT, 0});
  const std::vector<MergeSlot> merges = merge_table();
  const std::vector<uint8_t> cut_bytes = cuts();
  header.spelling_slots = static_cast<uint32_t>(table_.size());
  header.merge_slots = static_cast<uint32_t>(merges.size());
  Sections sections(sizeof header);
  header.starts = sections.add(starts.data(), starts.size());
  header.spellings = sections.add(texts.data(), texts.size());
  header.flags = sections.add(flags.data(), flags.size());
  header.characters = sections.add(characters.data(), characters.size());
  header.bytes = sections.add(bytes.data(), bytes.size());
  header.cuts = sections.add(cut_bytes.data(), cut_bytes.size());
  header.spelling_table = sections.add(table_.data(), table_.size());
  header.merge_table = sections.add(merges.data(), merges.size());
  header.notes = sections.add(notes.data(), notes.size());
  std::string& file = sections.file();
  header.end = header.num_bytes = file.size();
  const auto* data = reinterpret_cast<const uint8_t*>(file.data());
  header.checksum = checksum_of(data + sizeof header, file.size() - sizeof header);
  std::memcpy(file.data(), &header, sizeof header);
  return std::move(file);
}

}  // namespace tokenmill
