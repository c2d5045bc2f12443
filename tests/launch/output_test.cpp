#include "cohort/launch/internal/output.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include "cohort/launch/worker.h"

namespace cohort::launch {
namespace {

using std::chrono::milliseconds;

std::vector<std::string> split(const std::vector<std::string>& pieces) {
  std::vector<std::string> lines;
  LineSplitter splitter([&](std::string_view line) { lines.emplace_back(line); });
  for (const std::string& piece : pieces) splitter.feed(piece);
  splitter.finish();
  return lines;
}

TEST(OutputTest, LinesAreCutWhereverThePiecesEnd) {
  using Lines = std::vector<std::string>;
  EXPECT_EQ(split({"one\ntwo\n"}), (Lines{"one", "two"}));
  EXPECT_EQ(split({"o", "ne\nt", "wo"}), (Lines{"one", "two"})) << "the last without an end";
  EXPECT_EQ(split({"one\r", "\ntwo\r\n\n"}), (Lines{"one", "two", ""}));
  EXPECT_EQ(split({"10%\r20%\r30%"}), (Lines{"10%", "20%", "30%"}));
  EXPECT_EQ(split({std::string(70000, 'x')}).size(), 2u) << "without a bound one line fills memory";
}

TEST(OutputTest, TheTailHoldsTheLastLines) {
  Tail tail;
  for (int i = 0; i < 50; ++i) tail.add(std::to_string(i));
  tail.add("");
  tail.add(std::string(5000, 'x'));
  const auto lines = tail.lines();
  ASSERT_EQ(lines.size(), Tail::kMaxLines);
  EXPECT_EQ(lines.front(), "31");
  EXPECT_EQ(lines.back().size(), Tail::kMaxBytes);
}

TEST(OutputTest, AWarningThatSeveralRanksGiveIsShownOnce) {
  WarningFilter filter;
  EXPECT_TRUE(filter.shows(0, "12:00:00 warning no GPU"));
  EXPECT_FALSE(filter.shows(1, "12:00:01 warning no GPU")) << "another second, the same words";
  EXPECT_TRUE(filter.shows(1, "12:00:01 warning rank 1 is slow"));
  EXPECT_TRUE(filter.shows(1, "12:00:01 warning no GPU")) << "the second time that one rank says it";
  EXPECT_FALSE(filter.shows(0, "12:00:02 warning no GPU"));
  EXPECT_TRUE(filter.shows(0, "12:00:00 info no GPU")) << "no warning";
  EXPECT_TRUE(filter.shows(1, "12:00:00 info no GPU"));
  EXPECT_TRUE(filter.shows(0, "warning"));
  EXPECT_TRUE(filter.shows(1, "warning"));
}

TEST(OutputTest, AConsoleThatNobodyReadsDoesNotHoldUp) {
  Pipe pipe = make_pipe();
  Console console(pipe.write.get(), pipe.write.get());
  const std::string text(3 * 1024 * 1024, 'x');
  console.write(Stream::kOut, text);
  console.pump();  // returns, though the pipe takes 64 KiB
  EXPECT_TRUE(console.full());
  EXPECT_FALSE(console.flush(base::Deadline(milliseconds(50))));
  std::string read;
  std::vector<char> buffer(65536);
  while (read.size() < text.size()) {
    console.pump();
    const ssize_t count = ::read(pipe.read.get(), buffer.data(), buffer.size());
    if (count > 0) read.append(buffer.data(), static_cast<std::size_t>(count));
  }
  EXPECT_EQ(read, text);
  EXPECT_TRUE(console.empty());
}

TEST(OutputTest, AReaderThatIsGoneLosesTheRest) {
  ::signal(SIGPIPE, SIG_IGN);
  Pipe pipe = make_pipe();
  Console console(pipe.write.get(), pipe.write.get());
  pipe.read.close();
  console.write(Stream::kErr, "text");
  EXPECT_TRUE(console.flush(base::Deadline(milliseconds(1000))));
}

}  // namespace
}  // namespace cohort::launch
