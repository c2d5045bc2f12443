// libcurl's multi interface, on the thread that calls wait(). curl keeps connections: one for the watch, one
// for requests.
//
// An answer is kept while it comes, up to kMaxAnswerBytes; a longer one ends the request. Lines of a stream
// are told as soon as they are there. What curl takes from the environment is taken back: a proxy of this
// host would keep agents from etcd, and see the password. Redirects are not followed, so a token goes only
// where the options say.
#include "cohort/membership/etcd/internal/http_client.h"

#include <openssl/crypto.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/membership/etcd/internal/gateway.h"

namespace cohort::membership::etcd {
namespace {

using base::concat;

CURLM* make_multi() {
  // Without NO_ATEXIT OpenSSL's memory goes as the process ends, also while this thread is in OpenSSL.
  static const bool is_ready = ::OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, nullptr) == 1 &&
                               ::curl_global_init(CURL_GLOBAL_DEFAULT) == CURLE_OK;
  CURLM* const multi = is_ready ? ::curl_multi_init() : nullptr;
  if (multi == nullptr) throw SystemError("membership.etcd", "libcurl cannot be used");
  return multi;
}

// Ranks that are started do not inherit it.
curl_socket_t open_socket(void*, curlsocktype, curl_sockaddr* address) {
  return ::socket(address->family, address->socktype | SOCK_CLOEXEC, address->protocol);
}

bool is_about_tls(CURLcode code) {
  switch (code) {
    case CURLE_SSL_CONNECT_ERROR:
    case CURLE_PEER_FAILED_VERIFICATION:
    case CURLE_SSL_CERTPROBLEM:
    case CURLE_SSL_CACERT_BADFILE:
    case CURLE_RECV_ERROR:  // so does a server end a handshake that lacks a certificate
      return true;
    default:
      return false;
  }
}

}  // namespace

struct HttpClient::Transfer {
  Transfer(std::uint64_t its_id, const HttpRequest& request, bool has_tls, std::vector<HttpEvent>& all_events)
      : id(its_id), is_stream(request.is_stream), is_tls(has_tls), body(request.body), events(all_events) {}
  ~Transfer() {
    ::curl_easy_cleanup(easy);
    ::curl_slist_free_all(headers);
  }
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  int status() const {
    long status = 0;
    ::curl_easy_getinfo(easy, CURLINFO_RESPONSE_CODE, &status);
    return static_cast<int>(status);
  }

  // Of curl: returns how much it took; any other number ends the request.
  static std::size_t take(const char* bytes, std::size_t, std::size_t count, void* of_transfer) {
    auto& transfer = *static_cast<Transfer*>(of_transfer);
    transfer.received.append(bytes, count);
    if (transfer.is_stream && transfer.status() == 200) transfer.deliver_lines();
    transfer.is_too_long = transfer.received.size() > kMaxAnswerBytes;
    return transfer.is_too_long ? 0 : count;
  }

  void deliver_lines() {
    std::size_t begin = 0;
    for (std::size_t end; (end = received.find('\n', std::max(begin, searched))) != std::string::npos;
         begin = end + 1) {
      if (end > begin) events.push_back({id, true, 200, received.substr(begin, end - begin)});
    }
    received.erase(0, begin);
    searched = received.size();
  }

  std::string problem(CURLcode code) const {
    if (is_too_long) return concat("its answer is longer than ", kMaxAnswerBytes >> 20, " MiB");
    if (code == CURLE_OPERATION_TIMEDOUT) return "no answer in time";
    if (code == CURLE_GOT_NOTHING && !is_tls) {
      return concat(::curl_easy_strerror(code), ", as where TLS is expected. Try: protocol=https");
    }
    if (!is_about_tls(code) || error[0] == '\0') return ::curl_easy_strerror(code);
    const std::string_view detail = error.data();
    const char* const hint =
        detail.find("alert") != detail.npos ? ". Try: ssl_cert and ssl_cert_key that etcd accepts"
        : code == CURLE_PEER_FAILED_VERIFICATION
            ? ". Try: ca_cert, the authority of etcd's certificate, and a name that it has"
            : "";
    return concat(::curl_easy_strerror(code), ": ", detail, hint);
  }

  const std::uint64_t id;
  const bool is_stream, is_tls;
  const std::string body;
  std::vector<HttpEvent>& events;
  CURL* easy = nullptr;
  curl_slist* headers = nullptr;
  std::string received;
  std::size_t searched = 0;  // so much of it has no end of a line
  bool is_too_long = false;
  std::array<char, CURL_ERROR_SIZE> error{};
};

HttpClient::HttpClient(HttpOptions options) : options_(std::move(options)), multi_(make_multi()) {}

HttpClient::~HttpClient() {
  while (!transfers_.empty()) cancel(transfers_.begin()->first);
  ::curl_multi_cleanup(multi_);
}

void HttpClient::set_tls(CURL* easy) const {
  const auto set = [&](CURLoption option, const std::filesystem::path& path) {
    if (!path.empty()) ::curl_easy_setopt(easy, option, path.c_str());
  };
  set(CURLOPT_CAINFO, options_.authorities);
  if (!options_.authorities.empty()) ::curl_easy_setopt(easy, CURLOPT_CAPATH, nullptr);  // none but these
  set(CURLOPT_SSLCERT, options_.certificate);
  set(CURLOPT_SSLKEY, options_.key);
  ::curl_easy_setopt(easy, CURLOPT_SSLVERSION, static_cast<long>(CURL_SSLVERSION_TLSv1_2));
}

std::uint64_t HttpClient::start(const HttpRequest& request) {
  auto transfer = std::make_unique<Transfer>(++last_id_, request, options_.is_tls, events_);
  CURL* const easy = ::curl_easy_init();
  if (easy == nullptr) throw SystemError("membership.etcd", "libcurl cannot make a request");
  transfer->easy = easy;
  const std::string url = concat(options_.is_tls ? "https://" : "http://", request.endpoint, request.path);
  ::curl_easy_setopt(easy, CURLOPT_URL, url.c_str());
  ::curl_easy_setopt(easy, CURLOPT_PRIVATE, transfer.get());
  ::curl_easy_setopt(easy, CURLOPT_ERRORBUFFER, transfer->error.data());
  ::curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, &Transfer::take);
  ::curl_easy_setopt(easy, CURLOPT_WRITEDATA, transfer.get());
  ::curl_easy_setopt(easy, CURLOPT_OPENSOCKETFUNCTION, &open_socket);
  ::curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
  ::curl_easy_setopt(easy, CURLOPT_PROXY, "");
  ::curl_easy_setopt(easy, CURLOPT_HTTP_VERSION, static_cast<long>(CURL_HTTP_VERSION_1_1));
  ::curl_easy_setopt(easy, CURLOPT_TCP_NODELAY, 1L);
  ::curl_easy_setopt(easy, CURLOPT_POSTFIELDS, transfer->body.c_str());
  ::curl_easy_setopt(easy, CURLOPT_POSTFIELDSIZE_LARGE, static_cast<curl_off_t>(transfer->body.size()));
  ::curl_easy_setopt(easy, CURLOPT_CONNECTTIMEOUT_MS, static_cast<long>(request.timeout.count()));
  if (!request.is_stream)
    ::curl_easy_setopt(easy, CURLOPT_TIMEOUT_MS, static_cast<long>(request.timeout.count()));
#if LIBCURL_VERSION_NUM >= 0x075700  // not to wait for a thread that looks for an address
  ::curl_easy_setopt(easy, CURLOPT_QUICK_EXIT, 1L);
#endif
  if (!request.may_repeat) ::curl_easy_setopt(easy, CURLOPT_FRESH_CONNECT, 1L);
  if (options_.is_tls) set_tls(easy);
  // curl would wait for a 100 before it sends a long body.
  for (const std::string& header : {std::string("Content-Type: application/json"), std::string("Expect:"),
                                    request.token.empty() ? "" : concat("Authorization: ", request.token)}) {
    if (!header.empty()) transfer->headers = ::curl_slist_append(transfer->headers, header.c_str());
  }
  ::curl_easy_setopt(easy, CURLOPT_HTTPHEADER, transfer->headers);
  ::curl_multi_add_handle(multi_, easy);
  transfers_.emplace(transfer->id, std::move(transfer));
  return last_id_;
}

void HttpClient::cancel(std::uint64_t id) {
  const auto found = transfers_.find(id);
  if (found == transfers_.end()) return;
  ::curl_multi_remove_handle(multi_, found->second->easy);
  transfers_.erase(found);
  std::erase_if(events_, [&](const HttpEvent& event) { return event.id == id; });
}

void HttpClient::finish(CURLMsg& message) {
  char* of_transfer = nullptr;
  ::curl_easy_getinfo(message.easy_handle, CURLINFO_PRIVATE, &of_transfer);
  auto& transfer = *reinterpret_cast<Transfer*>(of_transfer);
  HttpEvent event{.id = transfer.id};
  if (message.data.result == CURLE_OK) {
    event.status = transfer.status();
    event.text = std::move(transfer.received);
  } else {
    event.text = transfer.problem(message.data.result);
  }
  events_.push_back(std::move(event));
  ::curl_multi_remove_handle(multi_, transfer.easy);
  transfers_.erase(transfer.id);
}

std::vector<HttpEvent> HttpClient::wait(base::Deadline deadline) {
  bool has_waited = false;
  for (;;) {
    int running = 0, left = 0;
    ::curl_multi_perform(multi_, &running);
    while (CURLMsg* const message = ::curl_multi_info_read(multi_, &left)) {
      if (message->msg == CURLMSG_DONE) finish(*message);
    }
    if (!events_.empty() || has_waited || deadline.expired()) return std::exchange(events_, {});
    // Also ends when curl has to look at a timer of its own.
    int num_ready = 0;
    const CURLMcode code =
        ::curl_multi_poll(multi_, nullptr, 0, std::min(deadline.remaining_ms(), 1'000), &num_ready);
    if (code != CURLM_OK)
      throw SystemError("membership.etcd", concat("libcurl cannot wait: ", ::curl_multi_strerror(code)));
    has_waited = true;
  }
}

void HttpClient::wake_up() {
  ::curl_multi_wakeup(multi_);
}

}  // namespace cohort::membership::etcd
