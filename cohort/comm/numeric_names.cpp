// LibTorch asks getnameinfo() for the name of each peer, to have it at hand for messages. A symbol of our own
// of that name would stand before the C library's only where the program itself links this library. So
// LibTorch's entry for it is changed, in the table of addresses through which it calls other libraries (ELF's
// global offset table; System V ABI, "Dynamic Linking").
#include "cohort/comm/numeric_names.h"

#include <elf.h>
#include <link.h>
#include <netdb.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <mutex>
#include <string_view>
#include <utility>

namespace cohort::comm {
namespace {

int numeric_getnameinfo(const sockaddr* address, socklen_t size, char* host, socklen_t host_size,
                        char* service, socklen_t service_size, int flags) {
  return ::getnameinfo(address, size, host, host_size, service, service_size, flags | NI_NUMERICHOST);
}

#ifdef __x86_64__
constexpr unsigned kFunction = R_X86_64_JUMP_SLOT, kAddress = R_X86_64_GLOB_DAT;
#else
constexpr unsigned kFunction = R_AARCH64_JUMP_SLOT, kAddress = R_AARCH64_GLOB_DAT;
#endif

constexpr std::string_view kLibrary = "/libtorch_cpu.so";  // holds c10d

struct Entry {
  void** address = nullptr;
  bool is_read_only = false;
};

// The entry among `count` relocations; null if none is for getnameinfo.
void** find_entry(const ElfW(Rela) * each, std::size_t count, const ElfW(Sym) * symbols, const char* names,
                  std::uintptr_t base) {
  for (const ElfW(Rela)* end = each + count; each != end; ++each) {
    const auto type = static_cast<unsigned>(ELF64_R_TYPE(each->r_info));
    if (type != kFunction && type != kAddress) continue;
    if (std::strcmp(names + symbols[ELF64_R_SYM(each->r_info)].st_name, "getnameinfo") != 0) continue;
    return reinterpret_cast<void**>(base + each->r_offset);
  }
  return nullptr;
}

int look_into(dl_phdr_info* info, std::size_t, void* data) {
  Entry& entry = *static_cast<Entry*>(data);
  if (!std::string_view(info->dlpi_name).ends_with(kLibrary)) return 0;
  const std::uintptr_t base = info->dlpi_addr;
  const ElfW(Dyn)* dynamic = nullptr;
  std::uintptr_t read_only = 0, read_only_end = 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& part = info->dlpi_phdr[i];
    if (part.p_type == PT_DYNAMIC) dynamic = reinterpret_cast<const ElfW(Dyn)*>(base + part.p_vaddr);
    if (part.p_type != PT_GNU_RELRO) continue;
    read_only = base + part.p_vaddr;
    read_only_end = read_only + part.p_memsz;
  }
  if (dynamic == nullptr) return 1;
  std::uintptr_t symbols = 0, names = 0, calls = 0, others = 0;
  std::size_t call_bytes = 0, other_bytes = 0;
  for (; dynamic->d_tag != DT_NULL; ++dynamic) {
    if (dynamic->d_tag == DT_SYMTAB) symbols = dynamic->d_un.d_ptr;
    if (dynamic->d_tag == DT_STRTAB) names = dynamic->d_un.d_ptr;
    if (dynamic->d_tag == DT_JMPREL) calls = dynamic->d_un.d_ptr;
    if (dynamic->d_tag == DT_PLTRELSZ) call_bytes = dynamic->d_un.d_val;
    if (dynamic->d_tag == DT_RELA) others = dynamic->d_un.d_ptr;
    if (dynamic->d_tag == DT_RELASZ) other_bytes = dynamic->d_un.d_val;
  }
  if (symbols == 0 || names == 0) return 1;
  for (const auto& [list, bytes] : {std::pair(calls, call_bytes), std::pair(others, other_bytes)}) {
    if (entry.address != nullptr || list == 0) continue;
    entry.address =
        find_entry(reinterpret_cast<const ElfW(Rela)*>(list), bytes / sizeof(ElfW(Rela)),
                   reinterpret_cast<const ElfW(Sym)*>(symbols), reinterpret_cast<const char*>(names), base);
  }
  const auto at = reinterpret_cast<std::uintptr_t>(entry.address);
  entry.is_read_only = at >= read_only && at < read_only_end;
  return 1;
}

void change_entry() {
  Entry entry;
  ::dl_iterate_phdr(&look_into, &entry);
  if (entry.address == nullptr) return;  // LibTorch is part of another library, or does not ask
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  void* const begin = reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(entry.address) & ~(page - 1));
  if (::mprotect(begin, page, PROT_READ | PROT_WRITE) != 0) return;
  __atomic_store_n(entry.address, reinterpret_cast<void*>(&numeric_getnameinfo), __ATOMIC_RELEASE);
  if (entry.is_read_only) ::mprotect(begin, page, PROT_READ);
}

}  // namespace

void use_numeric_names() {
  static std::once_flag once;
  std::call_once(once, change_entry);
}

}  // namespace cohort::comm
