// Memory of one call: floats that begin at a multiple of 64 bytes.
#pragma once
#include <cstdint>
#include <new>

namespace slipstream {

// `std::bad_alloc` where there is no memory.
class Block {
  public:
    explicit Block(int64_t count) : memory(static_cast<float*>(::operator new(sizeof(float) * count, std::align_val_t{64}))) {}
    ~Block() { ::operator delete(memory, std::align_val_t{64}); }
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;
    operator float*() const { return memory; }

  private:
    float* memory;
};

}  // namespace slipstream
