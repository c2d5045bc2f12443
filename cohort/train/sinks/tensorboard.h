#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

/// Event files for TensorBoard, written without TensorFlow or protobuf.
namespace cohort::train {

/// Writes one event file, `events.out.tfevents.TIME.HOST.PID.0`, into a folder.
///
///     TensorBoardWriter writer(run_dir / "tensorboard", resumed ? std::optional(step) : std::nullopt);
///     writer.scalar("train/loss", 0.3, step);
///     writer.image_png("input/0", png, 28, 28, 1, 0);
///
/// Threads: one caller at a time. Events are buffered: `flush()` hands them to the kernel, and so does the
/// destructor (without throwing). Throws: SystemError naming the file.
class TensorBoardWriter {
 public:
  /// Makes `folder` if it is not there. With `resume_step`, events of earlier files with a step above it are
  /// purged by TensorBoard when it reads this one.
  explicit TensorBoardWriter(const std::filesystem::path& folder,
                             std::optional<std::int64_t> resume_step = std::nullopt);
  ~TensorBoardWriter();
  TensorBoardWriter(const TensorBoardWriter&) = delete;
  TensorBoardWriter& operator=(const TensorBoardWriter&) = delete;

  /// A point of the curve `tag`; TensorBoard keeps it as float32.
  void scalar(std::string_view tag, double value, std::int64_t step);
  /// `png` is an encoded PNG; `channels` is 1 (gray), 3 (RGB) or 4 (RGBA).
  void image_png(std::string_view tag, std::span<const std::byte> png, std::int64_t height,
                 std::int64_t width, std::int64_t channels, std::int64_t step);
  /// Text (Markdown) in TensorBoard's Text tab: for instance the effective configuration.
  void text(std::string_view tag, std::string_view markdown, std::int64_t step);
  /// Hands what was written to the kernel.
  void flush();

  /// The file, within the folder.
  const std::filesystem::path& path() const;

 private:
  struct File;
  std::unique_ptr<File> file_;
};

/// CRC-32C (Castagnoli), as event files use it.
std::uint32_t crc32c(std::span<const std::byte> bytes);

}  // namespace cohort::train
