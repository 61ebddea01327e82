#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include <cstring>
#include <stdexcept>

#include "kernels.h"
#include "vocabulary.h"

namespace nb = nanobind;

namespace tokenmill {

namespace {

std::string_view view(const nb::bytes& data) { return {data.c_str(), data.size()}; }

nb::object text_of(const Vocabulary& self, uint32_t id) {
  if (!self.flags(id)) return nb::none();
  const std::string_view spelling = self.spelling(id);
  PyObject* text = PyUnicode_DecodeUTF8(spelling.data(), static_cast<Py_ssize_t>(spelling.size()), "replace");
  if (!text) throw nb::python_error();
  return nb::steal(text);
}

nb::object id_of(const Vocabulary& self, std::string_view spelling) {
  const uint32_t id = self.find(spelling);
  return id == ABSENT ? nb::none() : nb::cast(id);
}

nb::bytes spelling_of(const Vocabulary& self, uint32_t id) {
  const std::string_view spelling = self.spelling(id);
  return nb::bytes(spelling.data(), spelling.size());
}

nb::bytes finish(VocabularyBuilder& self, uint32_t options, uint32_t unknown, const nb::bytes& notes) {
  std::string file;
  {
    const std::string_view text = view(notes);
    nb::gil_scoped_release release;
    file = self.finish(options, unknown, text);
  }
  return nb::bytes(file.data(), file.size());
}

struct Piece {
  uint32_t token;  // ABSENT: it is text
  uint32_t begin, end;
};

// Turns pieces of a text into ids.
class PieceEncoder {
 public:
  PieceEncoder(const Vocabulary& vocabulary, const nb::list& added, int spelling, int prefix, bool is_split)
      : encoder_(vocabulary),
        spelling_(static_cast<Spelling>(spelling)),
        prefix_(static_cast<Prefix>(prefix)),
        is_split_(is_split) {
    for (const auto one : added) added_.push_back(nb::cast<uint32_t>(one));
  }

  // numbers: 0 for a piece of text, else an added token's place in the list, from 1 on. spans: their characters.
  nb::list encode(std::string_view text, const nb::list& numbers, const nb::list& spans) const {
    std::vector<Piece> pieces;
    read(numbers, spans, pieces);
    std::vector<uint32_t> ids;
    {
      nb::gil_scoped_release release;
      find_bytes(text, pieces);
      ids.reserve(text.size() / 3 + 8);
      std::string spelled;
      for (const Piece& piece : pieces) {
        if (piece.token != ABSENT) {
          ids.push_back(piece.token);
        } else if (piece.end > piece.begin) {
          encode_piece(text.substr(piece.begin, piece.end - piece.begin), piece.begin == 0, spelled, ids);
        }
      }
    }
    nb::list result;
    for (const uint32_t id : ids) result.append(id);
    return result;
  }

 private:
  void read(const nb::list& numbers, const nb::list& spans, std::vector<Piece>& pieces) const {
    if (numbers.size() != spans.size()) throw std::invalid_argument("every piece has a number and a span");
    pieces.reserve(numbers.size());
    for (size_t at = 0; at < numbers.size(); ++at) {
      const auto number = nb::cast<uint32_t>(numbers[at]);
      if (number > added_.size()) throw std::invalid_argument("there is no such added token");
      const auto span = nb::cast<nb::tuple>(spans[at]);
      const uint32_t token = number ? added_[number - 1] : ABSENT;
      pieces.push_back({token, nb::cast<uint32_t>(span[0]), nb::cast<uint32_t>(span[1])});
    }
  }

  // Turn the places of characters into places of bytes.
  static void find_bytes(std::string_view text, std::vector<Piece>& pieces) {
    uint32_t characters = 0;
    size_t at = 0;
    const auto seek = [&](uint32_t place) {
      for (; characters < place && at < text.size(); ++characters) at += character_bytes(static_cast<uint8_t>(text[at]));
      return static_cast<uint32_t>(std::min(at, text.size()));
    };
    for (Piece& piece : pieces) {
      if (piece.token != ABSENT) continue;
      if (piece.begin < characters) characters = 0, at = 0;
      piece.begin = seek(piece.begin);
      piece.end = seek(piece.end);
    }
  }

  void encode_piece(std::string_view text, bool is_first, std::string& spelled, std::vector<uint32_t>& ids) const {
    if (spelling_ == Spelling::PLAIN) return encoder_.encode(text, ids);
    spelled.clear();
    if (spelling_ == Spelling::BYTES) {
      for (const char byte : text) append_byte_letter(static_cast<uint8_t>(byte), spelled);
      return encoder_.encode(spelled, ids);
    }
    if (needs_prefix(text, is_first)) spelled.append(MARK);
    for (const char byte : text) {
      if (byte == ' ') {
        spelled.append(MARK);
      } else {
        spelled.push_back(byte);
      }
    }
    if (!is_split_) return encoder_.encode(spelled, ids);
    size_t begin = 0;
    const std::string_view whole = spelled;
    for (size_t at = whole.find(MARK, 1); at != whole.npos; at = whole.find(MARK, at + MARK.size())) {
      encoder_.encode(whole.substr(begin, at - begin), ids);
      begin = at;
    }
    encoder_.encode(whole.substr(begin), ids);
  }

  bool needs_prefix(std::string_view text, bool is_first) const {
    if (prefix_ == Prefix::NONE || (prefix_ == Prefix::AT_START && !is_first)) return false;
    return prefix_ == Prefix::ALWAYS || !(text[0] == ' ' || text.substr(0, MARK.size()) == MARK);
  }

  PairEncoder encoder_;
  std::vector<uint32_t> added_;
  Spelling spelling_;
  Prefix prefix_;
  bool is_split_;
};

nb::bytes bytes_of(const std::string& text) { return nb::bytes(text.data(), text.size()); }

// Strings behind one another, each behind its length in eight bytes, as in a header of GGUF; returns their bytes.
template <class Take>
size_t for_each_string(Address data, size_t size, size_t count, const Take& take) {
  const char *const begin = at<const char>(data), *const end = begin + size, *text = begin;
  for (; count; --count) {
    uint64_t length = 0;
    const bool has_length = static_cast<size_t>(end - text) >= sizeof length;
    if (has_length) std::memcpy(&length, text, sizeof length), text += sizeof length;
    if (!has_length || static_cast<uint64_t>(end - text) < length) {
      throw std::out_of_range("the bytes end within a string");
    }
    take(text, length);
    text += length;
  }
  return static_cast<size_t>(text - begin);
}

nb::list read_strings(Address data, size_t size, size_t count) {
  nb::list strings;
  for_each_string(data, size, count, [&](const char* text, uint64_t length) {
    PyObject* string = PyUnicode_DecodeUTF8(text, static_cast<Py_ssize_t>(length), "replace");
    if (!string) throw nb::python_error();
    strings.append(nb::steal(string));
  });
  return strings;
}

size_t strings_size(Address data, size_t size, size_t count) {
  return for_each_string(data, size, count, [](const char*, uint64_t) {});
}

// All tokens of a model in the order of their ids.
void add_tokens(VocabularyBuilder& builder, const nb::list& spellings) {
  uint32_t id = 0;
  for (const nb::handle spelling : spellings) builder.add(id++, nb::cast<std::string_view>(spelling), IN_MODEL);
}

}  // namespace

void bind_vocabulary(nb::module_& module) {
  nb::class_<Vocabulary>(module, "Vocabulary")
      .def("__init__", [](Vocabulary* self, Address data, size_t size) {
        new (self) Vocabulary(at<const uint8_t>(data), size);
      }, nb::arg("data"), nb::arg("size"))
      .def("is_unchanged", &Vocabulary::is_unchanged, ReleaseGil())
      .def_prop_ro("num_ids", [](const Vocabulary& self) { return self.header().num_ids; })
      .def_prop_ro("num_tokens", [](const Vocabulary& self) { return self.header().num_tokens; })
      .def_prop_ro("longest", [](const Vocabulary& self) { return self.header().longest; })
      .def_prop_ro("notes", [](const Vocabulary& self) {
        const std::string_view notes = self.notes();
        return nb::bytes(notes.data(), notes.size());
      })
      .def("token", text_of, nb::arg("id"))
      .def("token_id", id_of, nb::arg("spelling"))
      .def("spelling", spelling_of, nb::arg("id"))
      .def("flags", &Vocabulary::flags, nb::arg("id"));
  nb::class_<PieceEncoder>(module, "PieceEncoder")
      .def(nb::init<const Vocabulary&, const nb::list&, int, int, bool>(), nb::keep_alive<1, 2>(),
           nb::arg("vocabulary"), nb::arg("added"), nb::arg("spelling"), nb::arg("prefix"), nb::arg("is_split"))
      .def("encode", &PieceEncoder::encode, nb::arg("text"), nb::arg("numbers"), nb::arg("spans"));
  nb::class_<VocabularyBuilder>(module, "VocabularyBuilder")
      .def(nb::init<>())
      .def("read_tokens", [](VocabularyBuilder& self, const nb::bytes& json) { self.read_tokens(view(json)); },
           nb::arg("json"))
      .def("read_merges", [](VocabularyBuilder& self, const nb::bytes& json) { self.read_merges(view(json)); },
           nb::arg("json"))
      .def("add_tokens", add_tokens, nb::arg("spellings"))
      .def("add_scored_merges", [](VocabularyBuilder& self, Address scores, Address marks) {
             self.add_scored_merges(at<const double>(scores), at<const uint8_t>(marks));
           }, nb::arg("scores"), nb::arg("marks"))
      .def("tokens_json", [](const VocabularyBuilder& self) { return bytes_of(self.tokens_json()); })
      .def("merges_json", [](const VocabularyBuilder& self) { return bytes_of(self.merges_json()); })
      .def("add", &VocabularyBuilder::add, nb::arg("id"), nb::arg("spelling"), nb::arg("flags"))
      .def("find", [](const VocabularyBuilder& self, std::string_view spelling) {
        const uint32_t id = self.find(spelling);
        return id == ABSENT ? nb::none() : nb::cast(id);
      }, nb::arg("spelling"), nb::sig("def find(self, spelling: str) -> int | None"))
      .def("finish", finish, nb::arg("options"), nb::arg("unknown"), nb::arg("notes"))
      .def_prop_ro("num_tokens", &VocabularyBuilder::num_tokens);
  module.def("strings_size", strings_size, nb::arg("data"), nb::arg("size"), nb::arg("count"));
  module.def("read_strings", read_strings, nb::arg("data"), nb::arg("size"), nb::arg("count"));
}

}  // namespace tokenmill
