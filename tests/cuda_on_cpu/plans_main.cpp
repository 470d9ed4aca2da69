// Would the compiled side take a plan? Host code alone: kernels are declared and never called.
// Reads "NAME COUNT integers ..." from standard input, and answers each with a line of 1 or 0.
#include <iostream>
#include <string>
#include <vector>

#include "depthwise_launch.h"
#include "direct_grad_launch.h"
#include "direct_launch.h"
#include "gather_launch.h"
#include "mma_launch.h"
#include "overlap_launch.h"
#include "sm90_launch.h"
#include "sm90_wgrad_launch.h"

namespace upconv {
namespace {

template <typename Plan>
bool taken(bool (*read)(const int64_t*, int64_t, Plan*), const std::vector<int64_t>& record) {
  static Plan plan;
  plan = Plan{};
  return read(record.data(), static_cast<int64_t>(record.size()), &plan);
}

bool taken(const std::string& name, const std::vector<int64_t>& record) {
  if (name == "direct_fprop") return taken(read_direct_plan, record);
  if (name == "mma_fprop") return taken(read_mma_plan, record);
  if (name == "overlap_fprop") return taken(read_overlap_plan, record);
  if (name == "sm90_wgmma_fprop") return taken(read_sm90_plan, record);
  if (name == "sm90_wgmma_wgrad") return taken(read_wgrad_plan, record);
  if (name.compare(0, 7, "gather_") == 0) return taken(read_gather_plan, record);
  if (name.compare(0, 10, "depthwise_") == 0) return taken(read_depthwise_plan, record);
  return taken(read_direct_grad_plan, record);
}

}  // namespace
}  // namespace upconv

int main() {
  std::string name;
  for (size_t count; std::cin >> name >> count;) {
    std::vector<int64_t> record(count);
    for (int64_t& value : record) std::cin >> value;
    std::cout << upconv::taken(name, record) << "\n";
  }
}
