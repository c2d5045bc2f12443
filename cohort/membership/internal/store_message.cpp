// A request to the ranks' store, or its reply, is one message of net. Its header is JSON: type or status, the
// request's number, and an integer. Keys and values are any bytes, so each is a payload.
#include "cohort/membership/internal/store_message.h"

#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "cohort/membership/internal/fields.h"

namespace cohort::membership {
namespace {

using nlohmann::json;

constexpr std::uint32_t kStoreChannel = 1;

void append(net::Message& message, const std::string& bytes) {
  const auto owner = std::make_shared<const std::string>(bytes);
  message.payloads.push_back({owner, std::as_bytes(std::span(owner->data(), owner->size())), false});
}

std::string text_of(const net::Payload& payload) {
  return {reinterpret_cast<const char*>(payload.bytes.data()), payload.bytes.size()};
}

std::vector<std::string> texts_of(const net::Message& message) {
  std::vector<std::string> texts;
  for (const net::Payload& payload : message.payloads) texts.push_back(text_of(payload));
  return texts;
}

bool has_bytes(StoreRequest::Type type) {
  using Type = StoreRequest::Type;
  return type == Type::kSet || type == Type::kCompareSet || type == Type::kAppend;
}

std::int64_t value_of(const Fields& fields, const json& value) {
  if (!value.is_number_integer()) fields.reject_field("value", "a whole number");
  return value.get<std::int64_t>();
}

}  // namespace

net::Message message_of(const StoreRequest& request) {
  net::Message message;
  message.channel = kStoreChannel;
  message.header = json({{"type", static_cast<unsigned>(request.type)},
                         {"number", request.number},
                         {"value", request.value}})
                       .dump();
  for (const std::string& key : request.keys) append(message, key);
  if (has_bytes(request.type)) append(message, request.bytes);
  if (request.type == StoreRequest::Type::kCompareSet) append(message, request.expected);
  return message;
}

net::Message message_of(const StoreReply& reply) {
  net::Message message;
  message.channel = net::kAnswerChannels + kStoreChannel;
  message.header =
      json(
          {{"status", static_cast<unsigned>(reply.status)}, {"number", reply.number}, {"value", reply.value}})
          .dump();
  for (const std::string& value : reply.values) append(message, value);
  return message;
}

StoreRequest parse_store_request(const net::Message& message) {
  using Type = StoreRequest::Type;
  const json object = parse_json(message.header);
  Fields fields(object, "a request to the store");
  StoreRequest request;
  const int type = fields.integer("type", 0);
  if (type > static_cast<int>(Type::kAppend)) fields.reject_field("type", "a type that this version knows");
  request.type = static_cast<Type>(type);
  request.number = fields.count("number");
  request.value = value_of(fields, fields.field("value"));
  fields.check_all_read();
  request.keys = texts_of(message);
  if (request.type == Type::kCompareSet) {
    if (request.keys.size() != 3) reject_text("a request to compare has no key and two values");
    request.expected = std::move(request.keys.back());
    request.keys.pop_back();
  }
  if (has_bytes(request.type)) {
    if (request.keys.size() != 2) reject_text("a request to set has no key and value");
    request.bytes = std::move(request.keys.back());
    request.keys.pop_back();
  }
  if ((request.type == Type::kAdd || request.type == Type::kRemove) && request.keys.size() != 1) {
    reject_text("a request to the store does not have one key");
  }
  return request;
}

StoreReply parse_store_reply(const net::Message& message) {
  const json object = parse_json(message.header);
  Fields fields(object, "an answer of the store");
  StoreReply reply;
  const int status = fields.integer("status", 0);
  if (status > static_cast<int>(StoreReply::Status::kInvalid)) {
    fields.reject_field("status", "one that this version knows");
  }
  reply.status = static_cast<StoreReply::Status>(status);
  reply.number = fields.count("number");
  reply.value = value_of(fields, fields.field("value"));
  fields.check_all_read();
  reply.values = texts_of(message);
  return reply;
}

}  // namespace cohort::membership
