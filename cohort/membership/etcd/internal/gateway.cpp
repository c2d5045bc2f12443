// etcd's gateway turns protocol buffers into JSON and back: bytes are base64, 64-bit numbers are texts, and a
// field that is zero, false or empty is left out. So a reader must take a missing field for a zero one, and
// cannot be as strict as that of the record; the record is checked later.
//
// A swap is one transaction: compare the key's revision, then put, else get. A key that does not exist has
// revision 0, so its creation needs no other comparison.
//
// Errors have a number of gRPC's and a sentence. Which is which, and the status, differ between versions (3.4
// answers "no space" by 403 or 429), so what matters is told by the sentence.
#include "cohort/membership/etcd/internal/gateway.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <nlohmann/json.hpp>

#include "cohort/base/error.h"
#include "cohort/base/text/bounded_json.h"
#include "cohort/membership/etcd/internal/base64.h"

namespace cohort::membership::etcd {
namespace {

using base::concat;
using nlohmann::json;

[[noreturn]] void reject_answer(const std::string& what) {
  throw CommError("membership.etcd", concat("an answer of etcd ", what),
                  "the endpoints of etcd, v3.4 or newer");
}

json parse_object(std::string_view text) {
  constexpr base::JsonLimits kLimits{.bytes = kMaxAnswerBytes, .depth = 16};
  std::optional<json> value = base::parse_bounded_json(text, kLimits);
  if (!value || !value->is_object()) reject_answer("is no JSON object");
  return *std::move(value);
}

// The field, or nullptr where it is left out.
const json* find_field(const json& object, const char* key) {
  const auto found = object.find(key);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

const json& object_at(const json& object, const char* key) {
  const json* const value = find_field(object, key);
  if (value == nullptr || !value->is_object()) reject_answer(concat("has no ", key));
  return *value;
}

std::uint64_t number_at(const json& object, const char* key) {
  const json* const value = find_field(object, key);
  if (value == nullptr) return 0;
  if (value->is_number_unsigned()) return value->get<std::uint64_t>();
  std::uint64_t number = 0;
  if (value->is_string()) {
    const auto& text = value->get_ref<const std::string&>();
    const char* const end = text.data() + text.size();
    if (!text.empty() && std::from_chars(text.data(), end, number) == std::from_chars_result{end, {}}) {
      return number;
    }
  }
  reject_answer(concat("has a ", key, " that is no number"));
}

bool flag_at(const json& object, const char* key) {
  const json* const value = find_field(object, key);
  if (value != nullptr && !value->is_boolean())
    reject_answer(concat("has a ", key, " that is not true or false"));
  return value != nullptr && value->get<bool>();
}

std::string text_at(const json& object, const char* key) {
  const json* const value = find_field(object, key);
  if (value != nullptr && !value->is_string()) reject_answer(concat("has a ", key, " that is no text"));
  return value == nullptr ? "" : value->get<std::string>();
}

const json& list_at(const json& object, const char* key) {
  static const json nothing = json::array();
  const json* const value = find_field(object, key);
  if (value != nullptr && !value->is_array()) reject_answer(concat("has a ", key, " that is no list"));
  return value == nullptr ? nothing : *value;
}

Header header_of(const json& object) {
  const json& header = object_at(object, "header");
  return {number_at(header, "cluster_id"), number_at(header, "revision")};
}

EtcdKeyValue entry_of(const json& pair) {
  if (!pair.is_object()) reject_answer("has a pair that is no object");
  EtcdKeyValue entry;
  entry.revision = number_at(pair, "mod_revision");
  if (entry.revision == 0) reject_answer("has a key without a revision");
  std::optional<std::string> text = decode_base64(text_at(pair, "value"));
  if (!text) reject_answer("has a value that is no base64");
  entry.text = *std::move(text);
  return entry;
}

EtcdKeyValue first_entry(const json& range) {
  const json& pairs = list_at(range, "kvs");
  return pairs.empty() ? EtcdKeyValue() : entry_of(pairs.front());
}

// What a person can read of an answer that is not understood.
std::string excerpt(std::string_view body) {
  std::string text(body.substr(0, 100));
  std::replace_if(text.begin(), text.end(), [](char letter) { return letter < ' ' || letter > '~'; }, ' ');
  text.erase(text.find_last_not_of(' ') + 1);
  return text;
}

struct KnownError {
  const char* part;  // of etcd's sentence
  Rejection::Type type;
  const char* hint;
};
constexpr auto kLogin = Rejection::Type::kLogin, kOther = Rejection::Type::kOther;
constexpr std::array<KnownError, 9> kKnownErrors = {{
    {"invalid auth token", kLogin, "a user and a password file"},
    {"user name is empty", kLogin, "a user and a password file"},
    {"revision of auth store is old", kLogin, "a user and a password file"},
    {"revision in header is old", kLogin, "a user and a password file"},
    {"authentication is not enabled", Rejection::Type::kNoLogin, "neither a user nor a password file"},
    {"authentication failed", kOther, "the right user and password"},
    {"permission denied", kOther, "a role that may read and write keys with this prefix"},
    {"database space exceeded", kOther,
     "etcd is full: etcdctl compact, etcdctl defrag, then etcdctl alarm disarm; or a larger "
     "--quota-backend-bytes"},
    {"request is too large", kOther, "a larger --max-request-bytes of etcd"},
}};

// The sentence of an error, of a request (`error` or `message`) or of a watch (`error.message`).
std::string sentence_of(std::string_view body) {
  try {
    const json object = parse_object(body);
    const json* const error = find_field(object, "error");
    if (error != nullptr && error->is_object()) return text_at(*error, "message");
    const std::string text = text_at(object, "error");
    return text.empty() ? text_at(object, "message") : text;
  } catch (const CommError&) {
    return "";
  }
}

}  // namespace

std::string read_request(std::string_view key, bool with_text) {
  json request = json::object({{"key", encode_base64(key)}});
  if (!with_text) request["keys_only"] = true;
  return request.dump();
}

std::string swap_request(std::string_view key, std::uint64_t expected, std::string_view text,
                         std::optional<std::uint64_t> lease) {
  const std::string encoded = encode_base64(key);
  json put = json::object({{"key", encoded}, {"value", encode_base64(text)}});
  if (lease) put["lease"] = std::to_string(*lease);
  const json compare = json::object(
      {{"key", encoded}, {"target", "MOD"}, {"result", "EQUAL"}, {"mod_revision", std::to_string(expected)}});
  json request = json::object();
  request["compare"] = json::array({compare});
  request["success"] = json::array({json::object({{"request_put", put}})});
  request["failure"] = json::array({json::object({{"request_range", json::object({{"key", encoded}})}})});
  return request.dump();
}

std::string watch_request(std::string_view key, std::uint64_t from) {
  json request = json::object();
  request["create_request"] =
      json::object({{"key", encode_base64(key)}, {"start_revision", std::to_string(from)}});
  return request.dump();
}

std::string login_request(std::string_view user, std::string_view password) {
  const json request = json::object({{"name", user}, {"password", password}});
  return request.dump(-1, ' ', false, json::error_handler_t::replace);
}

std::string lease_request(std::chrono::seconds time) {
  const json request = json::object({{"TTL", std::to_string(time.count())}});
  return request.dump();
}

ReadAnswer parse_read(std::string_view text) {
  const json object = parse_object(text);
  return {header_of(object), first_entry(object)};
}

SwapAnswer parse_swap(std::string_view text) {
  const json object = parse_object(text);
  SwapAnswer answer{header_of(object), flag_at(object, "succeeded"), {}};
  if (answer.is_made) {
    if (answer.header.revision == 0) reject_answer("has no revision");
    return answer;
  }
  const json& responses = list_at(object, "responses");
  if (responses.empty() || !responses.front().is_object()) reject_answer("has no response to its requests");
  answer.entry = first_entry(object_at(responses.front(), "response_range"));
  return answer;
}

WatchAnswer parse_watch(std::string_view line) {
  const json object = parse_object(line);
  WatchAnswer answer;
  if (const json* const error = find_field(object, "error"); error != nullptr && error->is_object()) {
    answer.is_canceled = true;
    answer.reason = text_at(*error, "message");
    return answer;
  }
  const json& result = object_at(object, "result");
  answer.header = header_of(result);
  answer.is_canceled = flag_at(result, "canceled");
  answer.compacted = number_at(result, "compact_revision");
  answer.reason = text_at(result, "cancel_reason");
  const json& events = list_at(result, "events");
  if (events.empty()) return answer;
  const json& event = events.back();
  if (!event.is_object()) reject_answer("has an event that is no object");
  EtcdKeyValue entry = entry_of(object_at(event, "kv"));
  answer.changed_at = entry.revision;
  if (text_at(event, "type") != "DELETE") answer.entry = std::move(entry);
  return answer;
}

std::string parse_login(std::string_view text) {
  const std::string token = text_at(parse_object(text), "token");
  const bool is_word = std::all_of(token.begin(), token.end(), [](char c) { return c > ' ' && c <= '~'; });
  if (token.empty() || !is_word) reject_answer("has no token");  // it becomes a line of a header
  return token;
}

std::uint64_t parse_lease(std::string_view text) {
  const std::uint64_t id = number_at(parse_object(text), "ID");
  if (id == 0) reject_answer("has no lease");
  return id;
}

Rejection rejection_of(std::string_view sentence) {
  for (const KnownError& known : kKnownErrors) {
    if (sentence.find(known.part) != std::string_view::npos) {
      return {known.type, concat(excerpt(sentence), ". Try: ", known.hint)};
    }
  }
  return {Rejection::Type::kEndpoint, excerpt(sentence)};
}

Rejection parse_rejection(int status, std::string_view body) {
  const std::string sentence = sentence_of(body);
  if (!sentence.empty() && status != 404) return rejection_of(sentence);
  if (body.find("HTTP request to an HTTPS server") != std::string_view::npos) {
    return {Rejection::Type::kEndpoint, "it speaks TLS only. Try: protocol=https"};
  }
  const bool has_no_path = status == 404;
  const char* const hint = has_no_path ? "etcd 3.4 or newer, with --enable-grpc-gateway" : "etcd's addresses";
  return {
      has_no_path ? Rejection::Type::kNoPath : Rejection::Type::kEndpoint,
      concat("status ", status, " (\"", excerpt(body), "\"), as no gateway of etcd v3 answers. Try: ", hint)};
}

}  // namespace cohort::membership::etcd
