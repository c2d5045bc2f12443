// LibTorch resolves the name of each peer's host, for its log messages. If Cohort defined getnameinfo(), that
// would override the C library's only in programs that link Cohort directly. So this file changes LibTorch's
// own entry for it, in the table of addresses through which it calls other libraries (ELF's global offset
// table; System V ABI, "Dynamic Linking").
#include "cohort/comm/internal/numeric_names.h"

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

#include "cohort/base/log.h"

namespace cohort::comm {
namespace {

int numeric_getnameinfo(const sockaddr* address, socklen_t size, char* host, socklen_t host_size,
                        char* service, socklen_t service_size, int flags) {
  return ::getnameinfo(address, size, host, host_size, service, service_size, flags | NI_NUMERICHOST);
}

#ifdef __x86_64__
constexpr unsigned kJumpSlot = R_X86_64_JUMP_SLOT, kGlobDat = R_X86_64_GLOB_DAT;
#else
constexpr unsigned kJumpSlot = R_AARCH64_JUMP_SLOT, kGlobDat = R_AARCH64_GLOB_DAT;
#endif

std::uintptr_t page_size() {
  return static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
}

// A library as it is loaded.
struct Library {
  std::uintptr_t base = 0;
  const ElfW(Dyn) * dynamic = nullptr;
  std::uintptr_t read_only = 0, read_only_end = 0;  // what the loader has protected: whole pages
};

// Finds the library that holds c10d, under any version in its name.
int find_libtorch(dl_phdr_info* info, std::size_t, void* data) {
  const std::string_view path(info->dlpi_name);
  if (!path.substr(path.rfind('/') + 1).starts_with("libtorch_cpu.so")) return 0;
  Library& library = *static_cast<Library*>(data);
  library.base = info->dlpi_addr;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& part = info->dlpi_phdr[i];
    const std::uintptr_t begin = library.base + part.p_vaddr;
    if (part.p_type == PT_DYNAMIC) library.dynamic = reinterpret_cast<const ElfW(Dyn)*>(begin);
    if (part.p_type != PT_GNU_RELRO) continue;
    library.read_only = begin & ~(page_size() - 1);
    library.read_only_end = (begin + part.p_memsz) & ~(page_size() - 1);
  }
  return 1;
}

// What the dynamic section says of one tag; 0 if it has none.
std::uintptr_t value_of(const Library& library, ElfW(Sxword) tag) {
  for (const ElfW(Dyn)* each = library.dynamic; each->d_tag != DT_NULL; ++each) {
    if (each->d_tag == tag) return each->d_un.d_val;
  }
  return 0;
}

// The same where it is an address, which glibc has relocated and other loaders have not.
template <typename T>
const T* pointer_of(const Library& library, ElfW(Sxword) tag) {
  const std::uintptr_t value = value_of(library, tag);
  return reinterpret_cast<const T*>(value != 0 && value < library.base ? value + library.base : value);
}

// The entry for getnameinfo() among relocations; null if there is none.
void** find_entry(const Library& library, ElfW(Sxword) relocations_tag, ElfW(Sxword) bytes_tag) {
  const auto* symbols = pointer_of<ElfW(Sym)>(library, DT_SYMTAB);
  const auto* names = pointer_of<char>(library, DT_STRTAB);
  const auto* each = pointer_of<ElfW(Rela)>(library, relocations_tag);
  if (symbols == nullptr || names == nullptr || each == nullptr) return nullptr;
  const auto* end = each + value_of(library, bytes_tag) / sizeof(ElfW(Rela));
  for (; each != end; ++each) {
    const auto type = static_cast<unsigned>(ELF64_R_TYPE(each->r_info));
    if (type != kJumpSlot && type != kGlobDat) continue;
    if (std::strcmp(names + symbols[ELF64_R_SYM(each->r_info)].st_name, "getnameinfo") != 0) continue;
    return reinterpret_cast<void**>(library.base + each->r_offset);
  }
  return nullptr;
}

bool change_entry() {
  Library library;
  ::dl_iterate_phdr(&find_libtorch, &library);
  if (library.dynamic == nullptr) return false;
  void** entry = find_entry(library, DT_JMPREL, DT_PLTRELSZ);
  if (entry == nullptr) entry = find_entry(library, DT_RELA, DT_RELASZ);
  if (entry == nullptr) return false;
  const auto at = reinterpret_cast<std::uintptr_t>(entry);
  void* const page = reinterpret_cast<void*>(at & ~(page_size() - 1));
  const bool is_read_only = at >= library.read_only && at < library.read_only_end;
  if (is_read_only && ::mprotect(page, page_size(), PROT_READ | PROT_WRITE) != 0) return false;
  __atomic_store_n(entry, reinterpret_cast<void*>(&numeric_getnameinfo), __ATOMIC_RELEASE);
  if (is_read_only) ::mprotect(page, page_size(), PROT_READ);
  return true;
}

}  // namespace

void use_numeric_names() {
  static std::once_flag once;
  std::call_once(once, [] {
    if (change_entry()) return;
    base::log_debug("LibTorch resolves host names as before: its call of getnameinfo() was not found");
  });
}

}  // namespace cohort::comm
