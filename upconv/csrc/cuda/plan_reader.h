// Plan integers -> the fields of a kernel's parameters.
#pragma once

#include <cstdint>

namespace upconv {

// Hands out the integers of a plan in their order. One that its field cannot hold makes the plan a
// bad one, as do too few and too many: cut off, it would be a number of another plan.
class PlanReader {
 public:
  PlanReader(const int64_t* record, int64_t length) : record_(record), length_(length) {}

  template <typename Number>
  void read(Number* field) {
    const int64_t value = at_ < length_ ? record_[at_] : 0;
    ++at_;
    *field = static_cast<Number>(value);
    fits_ = fits_ && static_cast<int64_t>(*field) == value;
  }

  // All integers have been taken, and each one fitted.
  bool whole() const { return fits_ && at_ == length_; }

 private:
  const int64_t* record_;
  int64_t length_, at_ = 0;
  bool fits_ = true;
};

}  // namespace upconv
