// Tests that buffered transfers do not stay in the page cache.
#include <sys/mman.h>

#include <thread>

#include "support.h"

using namespace infinity::aio;
using namespace infinity::aio::testing;

namespace {

size_t resident_pages(const File& file, size_t nbytes) {
  void* map = ::mmap(nullptr, nbytes, PROT_READ, MAP_SHARED, file.fd(), 0);
  std::vector<unsigned char> pages(nbytes / 4096);
  ::mincore(map, nbytes, pages.data());
  ::munmap(map, nbytes);
  size_t count = 0;
  for (const unsigned char page : pages) count += page & 1u;
  return count;
}

bool becomes_empty(const File& file, size_t nbytes) {
  for (int attempt = 0; attempt < 500; ++attempt) {
    if (resident_pages(file, nbytes) == 0) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

}  // namespace

TEST(page_cache_is_empty_after_buffered_transfers) {
  with_each_backend([](BackendKind backend) {
    constexpr size_t kBytes = 48u << 20;  // more than kMaxDirtyBytes
    Scratch scratch(kBytes, Direct::off);
    if (scratch.file->file_system() == "tmpfs") return;  // its files are in the page cache
    EngineConfig config = small_config(backend);
    config.block_size = 1 << 20;
    const auto engine = Engine::start(config);
    Buffer out(kBytes);
    out.mark(3);
    CHECK(outcome(*engine->submit(Op::write, {{scratch.file, 0, kBytes, out.address()}})) == 0);
    // At most the dirty ranges and the blocks in flight may be resident.
    CHECK(resident_pages(*scratch.file, kBytes) * 4096 <=
          PageCacheSweeper::kMaxDirtyBytes + (8u << 20));
    CHECK(becomes_empty(*scratch.file, kBytes));
    Buffer in(kBytes);
    CHECK(outcome(*engine->submit(Op::read, {{scratch.file, 0, kBytes, in.address()}})) == 0);
    CHECK(in.is_marked(3, 0, kBytes));
    CHECK(becomes_empty(*scratch.file, kBytes));
    close(*engine);
  });
}

TEST(page_cache_write_back_errors_persist) {
  Scratch scratch(kBlock, Direct::off);
  const auto engine = Engine::start(small_config(BackendKind::threads));
  Buffer buffer(kBlock);
  const std::vector<Segment> segments{{scratch.file, 0, kBlock, buffer.address()}};
  CHECK(outcome(*engine->submit(Op::write, segments)) == 0);
  CHECK(scratch.file->sync());
  scratch.file->record_write_back(-EIO);
  scratch.file->record_write_back(-ENOSPC);  // the first error is kept
  CHECK(outcome(*engine->submit(Op::write, segments)) == EIO);
  CHECK_THROWS(IoFailure, scratch.file->sync());
  close(*engine);
}
