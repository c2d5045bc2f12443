// What TLS costs between two nodes over loopback: a small message there and back, and 4 MB one way.
// Run: net_tls [ROUNDS]
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <vector>

#include "cohort/bench/compare.h"
#include "cohort/bench/timeit.h"
#include "tls_links.h"

namespace {

namespace bench = cohort::bench;
using bench_net::Link;

constexpr std::size_t kLargeBytes = std::size_t{4} << 20;

void compare(const char* name, int rounds, const std::function<void(Link&)>& work) {
  const auto variant = [&](const char* transport, bool has_tls) {
    const auto link = std::make_shared<Link>(has_tls);
    return bench::Variant(transport, std::function<void()>([link, work] { work(*link); }));
  };
  const bench::Comparison figures =
      bench::compare({variant("TCP", false), variant("TCP with TLS", true)},
                     bench::CompareOptions().timeit(bench::TimeitOptions().label(name).rounds(rounds)));
  std::printf("%s\n%s\n", name, figures.text().c_str());
}

}  // namespace

int main(int count, char** arguments) {
  try {
    const int rounds = count > 1 ? std::atoi(arguments[1]) : 5;
    compare("100 bytes there and back", rounds, [](Link& link) { link.exchange_small(); });
    const std::shared_ptr<std::byte> memory(new std::byte[kLargeBytes], std::default_delete<std::byte[]>());
    std::memset(memory.get(), 1, kLargeBytes);
    compare("4 MB one way", rounds, [&memory](Link& link) { link.send_large(memory, kLargeBytes); });
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
