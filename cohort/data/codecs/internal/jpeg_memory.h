#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <iterator>

#include "cohort/data/codecs/internal/arena.h"

// clang-format off: jpeglib.h needs <cstdio> before it, and jerror.h needs jpeglib.h
#include <jpeglib.h>
#include <jerror.h>
// clang-format on

/// Puts an arena under a libjpeg decompressor, for all that lives as long as one image.
namespace cohort::data {

/// libjpeg's own manager calls malloc and free some thirty times an image. This one replaces the methods of
/// the manager that libjpeg made: what is allocated after `install` is gone after `clear`, tables too, which
/// in libjpeg live on (a file without Huffman tables would be read with those of the file before). Ownership:
/// must outlive the decompressor, and is found through its `client_data`.
class JpegMemory {
 public:
  /// `info` was just created, with `client_data` pointing here.
  void install(jpeg_decompress_struct& info) {
    original_free_pool_ = info.mem->free_pool;
    info.mem->alloc_small = allocate;
    info.mem->alloc_large = allocate;
    info.mem->alloc_sarray = allocate_samples;
    info.mem->alloc_barray = allocate_blocks;
    info.mem->request_virt_barray = request_blocks;
    info.mem->realize_virt_arrays = realize;
    info.mem->access_virt_barray = access_blocks;
    info.mem->free_pool = free_pool;
  }

  /// Ends the image that `info` was busy with, if any, and takes its memory back.
  void clear(jpeg_decompress_struct& info) {
    jpeg_abort_decompress(&info);
    std::fill(std::begin(info.quant_tbl_ptrs), std::end(info.quant_tbl_ptrs), nullptr);
    std::fill(std::begin(info.dc_huff_tbl_ptrs), std::end(info.dc_huff_tbl_ptrs), nullptr);
    std::fill(std::begin(info.ac_huff_tbl_ptrs), std::end(info.ac_huff_tbl_ptrs), nullptr);
    requested_ = nullptr;
    arena_.reset();
  }

 private:
  /// What a jvirt_barray_ptr points to: an array of coefficients of the whole image.
  struct VirtualBlocks {
    JBLOCKARRAY rows;
    JDIMENSION blocks_per_row;
    JDIMENSION num_rows;
    boolean zero;
    VirtualBlocks* next;
  };

  static JpegMemory& self(j_common_ptr info) { return *static_cast<JpegMemory*>(info->client_data); }

  static void* allocate(j_common_ptr info, int, size_t bytes) {
    void* piece = self(info).arena_.allocate(bytes);
    if (piece == nullptr) {
      ERREXIT1(info, JERR_OUT_OF_MEMORY, 0);
    }
    return piece;
  }

  template <typename Row>
  static Row* allocate_rows(j_common_ptr info, int pool, size_t row_bytes, JDIMENSION num_rows) {
    row_bytes = (row_bytes + Arena::kAlignment - 1) & ~(Arena::kAlignment - 1);
    auto* rows = static_cast<Row*>(allocate(info, pool, num_rows * sizeof(Row)));
    auto* bytes = static_cast<unsigned char*>(allocate(info, pool, num_rows * row_bytes));
    for (JDIMENSION i = 0; i < num_rows; ++i) {
      rows[i] = reinterpret_cast<Row>(bytes + i * row_bytes);
    }
    return rows;
  }

  static JSAMPARRAY allocate_samples(j_common_ptr info, int pool, JDIMENSION per_row, JDIMENSION num_rows) {
    return allocate_rows<JSAMPROW>(info, pool, per_row, num_rows);
  }

  static JBLOCKARRAY allocate_blocks(j_common_ptr info, int pool, JDIMENSION per_row, JDIMENSION num_rows) {
    return allocate_rows<JBLOCKROW>(info, pool, per_row * sizeof(JBLOCK), num_rows);
  }

  static jvirt_barray_ptr request_blocks(j_common_ptr info, int, boolean zero, JDIMENSION per_row,
                                         JDIMENSION num_rows, JDIMENSION) {
    JpegMemory& memory = self(info);
    auto* blocks = static_cast<VirtualBlocks*>(allocate(info, JPOOL_IMAGE, sizeof(VirtualBlocks)));
    *blocks = {nullptr, per_row, num_rows, zero, memory.requested_};
    memory.requested_ = blocks;
    return reinterpret_cast<jvirt_barray_ptr>(blocks);
  }

  static void realize(j_common_ptr info) {
    JpegMemory& memory = self(info);
    for (VirtualBlocks* blocks = memory.requested_; blocks != nullptr; blocks = blocks->next) {
      if (blocks->rows == nullptr) {
        blocks->rows = allocate_blocks(info, JPOOL_IMAGE, blocks->blocks_per_row, blocks->num_rows);
        if (blocks->zero) {
          for (JDIMENSION row = 0; row < blocks->num_rows; ++row) {
            std::memset(blocks->rows[row], 0, blocks->blocks_per_row * sizeof(JBLOCK));
          }
        }
      }
    }
  }

  static JBLOCKARRAY access_blocks(j_common_ptr info, jvirt_barray_ptr pointer, JDIMENSION start,
                                   JDIMENSION count, boolean) {
    auto* blocks = reinterpret_cast<VirtualBlocks*>(pointer);
    if (blocks->rows == nullptr || start > blocks->num_rows || count > blocks->num_rows - start) {
      ERREXIT(info, JERR_BAD_VIRTUAL_ACCESS);
    }
    return blocks->rows + start;
  }

  static void free_pool(j_common_ptr info, int pool) {
    self(info).original_free_pool_(info, pool);  // what libjpeg allocated before `install`
  }

  Arena arena_;
  void (*original_free_pool_)(j_common_ptr, int) = nullptr;
  VirtualBlocks* requested_ = nullptr;
};

}  // namespace cohort::data
