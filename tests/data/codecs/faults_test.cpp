#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

// clang-format off: jpeglib.h needs <cstdio> before it
#include <jpeglib.h>
// clang-format on

#include "cohort/base/error.h"
#include "cohort/data/codecs/codec.h"
#include "golden.h"
#include "tests/support/messages.h"

namespace cohort::data {
namespace {

using test::expect_in;

using Bytes = std::vector<std::byte>;

std::string message_of(const Bytes& file, const std::string& name, const DecodeOptions& options = {}) {
  try {
    Image image;
    decode_image(file, ColorMode::kRgb, name, image, options);
  } catch (const DataError& error) {
    return error.what();
  }
  return "no error";
}

TEST(FaultsTest, AnEmptyFileIsNamed) {
  expect_in(message_of({}, "train/cat/1.jpg"),
            {"[data.image]", "train/cat/1.jpg", "empty (0 bytes)", "Try:"});
}

TEST(FaultsTest, TextNamedJpgIsNamedAndShown) {
  expect_in(
      message_of(to_bytes("hello, I am no image"), "train/cat/2.jpg"),
      {"train/cat/2.jpg", "not an image", "text that starts with \"hello, I am no", "expected JPEG or PNG"});
}

TEST(FaultsTest, OtherFormatsAreRecognised) {
  expect_in(message_of(to_bytes("GIF89a......"), "a.jpg"), {"a.jpg", "a GIF"});
  expect_in(message_of(to_bytes("RIFF....WEBP"), "a.jpg"), {"WebP"});
  expect_in(message_of(to_bytes("<html><body>"), "a.jpg"), {"a web page"});
  expect_in(message_of(to_bytes("\x01\x02\x03\x04"), "a.jpg"), {"bytes 01 02 03 04"});
}

TEST(FaultsTest, ContentDecidesAndNotTheName) {
  EXPECT_EQ(message_of(golden_bytes("png_rgb.file"), "wrong.jpg"), "no error");
  EXPECT_EQ(message_of(golden_bytes("jpeg_420.file"), "wrong.png"), "no error");
}

TEST(FaultsTest, EveryTruncationIsAnErrorThatNamesTheFile) {
  for (const char* name : {"jpeg_420", "jpeg_grey", "jpeg_420_progressive", "png_rgb", "png_interlaced"}) {
    const Bytes whole = golden_bytes(std::string(name) + ".file");
    const bool png = std::string(name).starts_with("png");
    const size_t end =
        whole.size() - (png ? 20 : 3);  // a PNG may lack IEND; the two last bytes of a JPEG are its end
    for (size_t size = 9; size < end; size += 7) {
      const std::string message =
          message_of(Bytes(whole.begin(), whole.begin() + static_cast<ptrdiff_t>(size)), "cut");
      expect_in(message, {"cut: "});
      EXPECT_NE(message, "no error") << name << " cut to " << size;
    }
  }
  Bytes cut = golden_bytes("jpeg_420.file");
  cut.resize(cut.size() * 3 / 4);
  expect_in(message_of(cut, "c.jpg"),
            {"c.jpg: truncated JPEG: the file ends within the image", "copy the file again"});
  cut = golden_bytes("png_rgb.file");
  cut.resize(cut.size() * 3 / 4);
  expect_in(message_of(cut, "c.png"), {"c.png: truncated PNG"});
}

TEST(FaultsTest, ATruncatedFileFailsWhateverTheRegion) {
  for (const char* name : {"jpeg_420.file", "png_rgb.file"}) {
    Bytes cut = golden_bytes(name);
    cut.resize(cut.size() - 30);
    thread_decoder().open(cut, ColorMode::kRgb, name);
    Image out;
    EXPECT_THROW(thread_decoder().read({0, 0, 1, 1}, out), DataError) << name;
  }
}

TEST(FaultsTest, DamagedJpegDataIsAnErrorUnlessItIsAccepted) {
  Bytes file = golden_bytes("jpeg_grey.file");
  file.resize(file.size() / 2);
  file.push_back(std::byte{0xFF});
  file.push_back(std::byte{0xD9});
  expect_in(message_of(file, "half.jpg"), {"half.jpg: broken JPEG", "premature end"});
  DecodeOptions lenient;
  lenient.accept_damage = true;
  EXPECT_EQ(message_of(file, "half.jpg", lenient), "no error");
}

TEST(FaultsTest, ADamagedPngIsAnError) {
  Bytes file = golden_bytes("png_rgb.file");
  file[file.size() / 2] ^= std::byte{0x10};
  expect_in(message_of(file, "bad.png"), {"bad.png: broken PNG"});
}

TEST(FaultsTest, AbsurdSizesAreRejectedBeforeMemoryIsTaken) {
  Bytes png = golden_bytes("png_rgb.file");
  DecodeOptions tight;
  tight.max_pixels = 100;
  expect_in(message_of(png, "big.png", tight), {"big.png: too large", "11x13", "at most 100", "max_pixels"});
  Bytes jpeg = golden_bytes("jpeg_420.file");
  expect_in(message_of(jpeg, "big.jpg", tight), {"big.jpg: too large", "19x27 = 513", "at most 100"});
  // A frame header that claims 65,500 x 65,500 pixels.
  const std::byte marker[] = {std::byte{0xFF}, std::byte{0xC0}};
  auto frame = std::search(jpeg.begin(), jpeg.end(), marker, marker + 2);
  ASSERT_NE(frame, jpeg.end());
  frame[5] = frame[7] = std::byte{0xFF};
  frame[6] = frame[8] = std::byte{0xDC};
  expect_in(message_of(jpeg, "claim.jpg"), {"claim.jpg: too large", "65500x65500", "178956970"});
}

// By libjpeg-turbo 2 itself; version 3 would take them, and it is our check that rejects.
TEST(FaultsTest, TwelveBitsASampleAreRejected) {
  Bytes jpeg = golden_bytes("jpeg_420.file");
  const std::byte marker[] = {std::byte{0xFF}, std::byte{0xC0}};
  auto frame = std::search(jpeg.begin(), jpeg.end(), marker, marker + 2);
  ASSERT_NE(frame, jpeg.end());
  frame[4] = std::byte{12};
  expect_in(message_of(jpeg, "deep.jpg"), {"deep.jpg: ", "precision 12"});
}

TEST(FaultsTest, TwoComponentsAreNoImage) {
  jpeg_compress_struct info;
  jpeg_error_mgr errors;
  info.err = jpeg_std_error(&errors);
  jpeg_create_compress(&info);
  unsigned char* data = nullptr;
  unsigned long size = 0;
  jpeg_mem_dest(&info, &data, &size);
  info.image_height = info.image_width = 8;
  info.input_components = 2;
  info.in_color_space = JCS_UNKNOWN;
  jpeg_set_defaults(&info);
  jpeg_start_compress(&info, TRUE);
  unsigned char row[16] = {};
  for (int y = 0; y < 8; ++y) {
    JSAMPROW pointer = row;
    jpeg_write_scanlines(&info, &pointer, 1);
  }
  jpeg_finish_compress(&info);
  jpeg_destroy_compress(&info);
  const Bytes file(reinterpret_cast<std::byte*>(data), reinterpret_cast<std::byte*>(data) + size);
  std::free(data);
  expect_in(message_of(file, "two.jpg"),
            {"two.jpg: a JPEG of 2 components, expected 1 (gray), 3 (colour) or 4"});
}

TEST(FaultsTest, AFailureLeavesNothingBehind) {
  const Bytes good = golden_bytes("jpeg_420.file"), png = golden_bytes("png_palette.file");
  for (size_t size = 4; size < good.size(); size += 11) {
    EXPECT_NE(message_of(Bytes(good.begin(), good.begin() + static_cast<ptrdiff_t>(size)), "cut"),
              "no error");
    Image image;
    decode_image(good, ColorMode::kRgb, "good", image);
    EXPECT_TRUE(image.pixels == golden_pixels("jpeg_420.rgb"));
    decode_image(png, ColorMode::kRgb, "good", image);
    EXPECT_TRUE(image.pixels == golden_pixels("png_palette.rgb"));
  }
}

TEST(FaultsTest, MisuseIsAUsageError) {
  Image out;
  thread_decoder().open(golden_bytes("jpeg_grey.file"), ColorMode::kGray, "a");
  EXPECT_THROW(thread_decoder().read({0, 0, 29, 1}, out), UsageError);
  EXPECT_THROW(thread_decoder().read({-1, 0, 2, 2}, out), UsageError);
  Image image;
  image.reshape(2, 2, 3);
  EXPECT_THROW(encode_jpeg(image, 0), UsageError);
  EXPECT_THROW(encode_jpeg(image, 101), UsageError);
  image.channels = 2;
  EXPECT_THROW(encode_png(image), UsageError);
}

}  // namespace
}  // namespace cohort::data
