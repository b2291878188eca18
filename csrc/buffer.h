// Memory that is kept from call to call and only grows; large ones lie on huge pages, where far fewer addresses have to
// be looked up.
#pragma once
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>
#ifdef __linux__
#include <sys/mman.h>
#endif

template <class T>
class Buffer {
 public:
  // Room for n, whatever was in it; starts at a whole cache line.
  T* get(size_t n) {
    if (n <= size_) return data_.get();
    const size_t align = n * sizeof(T) < kHuge ? 64 : kHuge, bytes = (n * sizeof(T) + align - 1) / align * align;
    data_.reset(static_cast<T*>(std::aligned_alloc(align, bytes)));
    size_ = data_ ? n : 0;
    if (!data_) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    if (align == kHuge) madvise(data_.get(), bytes, MADV_HUGEPAGE);
#endif
    return data_.get();
  }

 private:
  static constexpr size_t kHuge = 2 << 20;
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T, Free> data_;
  size_t size_ = 0;
};

// A vector that starts at a whole cache line.
template <class T>
struct LineAllocator {
  using value_type = T;
  LineAllocator() = default;
  template <class U>
  LineAllocator(const LineAllocator<U>&) {}
  T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t(64))); }
  void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t(64)); }
  bool operator==(const LineAllocator&) const { return true; }
};
template <class T>
using LineVector = std::vector<T, LineAllocator<T>>;
