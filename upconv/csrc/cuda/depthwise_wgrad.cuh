// The gradient of the weight of depthwise layers with a stride, and the bias's with it, at the
// memory's rate.
//
// grad_output is cut into blocks as in depthwise_igrad.cuh. Element r of block b meets tap r +
// h * stride by pixel b - h:
//
//     gw[r + h * stride] = sum over b of x[b - h] * gy[block b, element r]
//
// A thread has 4 columns of grad_output and one or two rows of a block, walks from block to block
// down the rows, and keeps the sums of all their taps in registers. x is small beside grad_output:
// a unit's part of it lies in shared memory. In the end the threads whose columns are the same
// elements of their blocks add up what they have as a tree, and the thread blocks of a channel
// ("shares") leave their sums in a workspace, which a second kernel adds up in a fixed order.
//
// The bias's gradient may nearly cancel and is added up in double, as in bias_gradient.cu.
#pragma once

#include "depthwise_ring.cuh"
#include "ordered_sum.cuh"

namespace upconv::direct {

// --- Work ------------------------------------------------------------------------------------

// What a thread is in its thread block.
struct DepthwiseRole {
  int lane, row_group, team, channel;

  __device__ explicit DepthwiseRole(const DepthwiseParams& p) {
    const int rest = p.by_lanes(threadIdx.x), group = p.by_row_groups(rest);
    lane = threadIdx.x - rest * p.lanes;
    row_group = rest - group * p.row_groups;
    channel = p.by_teams(group);
    team = group - channel * p.teams;
  }
};

// A part of one plane of grad_output: columns `x` on, rows of blocks `b` on, of image and plane.
struct DepthwisePart {
  int image, z, b, x;

  __device__ DepthwisePart(const DepthwiseParams& p, int unit) {
    const int strip_of = p.by_tiles_x(unit), plane = p.by_strips(strip_of);
    x = (unit - strip_of * p.tiles_x) * p.tile;
    b = p.first_row + (strip_of - plane * p.strips) * p.strip;
    image = p.by_depth(plane);
    z = plane - image * p.deep;
  }
};

// Elements of x that a thread reads before it places the first of them: their way from memory is
// what a unit begins with.
constexpr int kPlacedTogether = 8;

// The part of x that a unit meets, in shared memory: zeros where there is none. The lanes of a team
// walk down its columns, its row groups share the rows.
template <typename T>
__device__ __forceinline__ void place_input(const DepthwiseParams& p, const DepthwiseRole& role,
                                            const DepthwisePart& part, bool there, const T* x,
                                            float* place) {
  const int first = part.b - (p.reach_y - 1), rows = p.strip + p.reach_y - 1;
  const int column = p.by_stride_x(part.x + p.padding_x) - (p.reach_x - 1);
  const int64_t step = p.row_groups * p.in_pitch;
  for (int c = role.lane; c < p.x_columns; c += p.lanes) {
    const int limit = there && below(column + c, p.in_w) ? p.in_h : 0;
    for (int row = role.row_group; row < rows; row += kPlacedTogether * p.row_groups) {
      const T* from = x + (first + row) * p.in_pitch + column + c;
      float* to = place + row * p.x_columns + c;
      T found[kPlacedTogether];
#pragma unroll
      for (int n = 0; n < kPlacedTogether; ++n) {
        found[n] = below(first + row + n * p.row_groups, limit) ? *from : narrow<T>(0.f);
        from += step;
      }
#pragma unroll
      for (int n = 0; n < kPlacedTogether; ++n) {
        if (row + n * p.row_groups < rows) *to = widen(found[n]);
        to += p.row_groups * p.x_columns;
      }
    }
  }
}

// --- Sums of a thread block ------------------------------------------------------------------

// Members of a class: threads whose columns are the same elements of their blocks, in the same
// channel and row group. Afterwards the first one has the sum of all, always by the same tree.
template <int kCount>
__device__ __forceinline__ void add_members(int members, int classes, int member, int class_of,
                                            float* shared, float (&sums)[kCount]) {
  const int most = classes * (members / 2);
  for (int count = members; count > 1;) {
    const int half = (count + 1) / 2;
    if (member >= half && member < count) {
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        shared[i * most + class_of * (members / 2) + member - half] = sums[i];
    }
    __syncthreads();
    if (member + half < count) {
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        sums[i] += shared[i * most + class_of * (members / 2) + member];
    }
    __syncthreads();
    count = half;
  }
}

// The sum of neighbouring threads, in the first of them.
__device__ __forceinline__ double add_neighbours(int threads, int index, double* shared,
                                                 double sum) {
  double* const mine = shared + threadIdx.x;
  *mine = sum;
  for (int count = threads; count > 1;) {
    const int half = (count + 1) / 2;
    __syncthreads();
    if (index + half < count) *mine += mine[half];
    count = half;
  }
  return *mine;
}

// Where the sums of a tap lie among those of the classes.
template <int kRows, int kReachY, int kReachX>
struct TapPlace {
  int class_of, column, index;  // the first column of the period, and its sum

  __device__ TapPlace(const DepthwiseParams& p, int channel, int tap) {
    const int ky = p.by_kernel_x(tap), kx = tap - ky * p.kernel_x;
    const int hy = p.by_stride_y(ky), r = ky - hy * p.stride_y;
    const int hx = p.by_stride_x(kx);
    const int pad = p.padding_x - p.by_stride_x(p.padding_x) * p.stride_x;
    column = kx - hx * p.stride_x - pad;
    if (column < 0) column += p.stride_x;
    class_of = (channel * p.row_groups + r / kRows) * (p.period / kOwn);
    index = (r % kRows * kReachY + hy) * kReachX + hx;
  }
};

// --- The kernel ------------------------------------------------------------------------------

template <typename T, int kRows, int kReachY, int kReachX>
__global__ void __launch_bounds__(kDepthwiseThreads, 2)
    depthwise_wgrad_kernel(const __grid_constant__ DepthwiseParams p) {
  constexpr int kStages = kWgradStages<T>, kSums = kRows * kReachY * kReachX * kOwn;
  extern __shared__ __align__(16) unsigned char raw_memory[];
  const DepthwiseRole role(p);
  const int class_index = p.by_shares(blockIdx.x), share = blockIdx.x - class_index * p.shares;
  const int channels = p.by_kernel_z(class_index), kz = class_index - channels * p.kernel_z;
  const int channel = channels * p.block_channels + role.channel;
  const bool active = channel < p.channels;
  const bool adds_bias = p.sums && kz < p.stride_z;

  const int apart = p.threads * kOwn, team_threads = p.lanes * p.row_groups;
  T* const ring = reinterpret_cast<T*>(raw_memory);
  float* const x_place =
      reinterpret_cast<float*>(ring + kStages * kRows * apart) +
      (role.channel * p.teams + role.team) * ((p.strip + kReachY - 1) * p.x_columns);
  const int64_t image_outputs = static_cast<int64_t>(p.channels) * p.out_d * p.out_h * p.out_w;
  const int64_t image_inputs = static_cast<int64_t>(p.channels) * p.in_d * p.in_h * p.in_w;
  const T* const gy_channel = static_cast<const T*>(p.gy) + channel * p.out_channel;
  const T* const x_channel = static_cast<const T*>(p.other) + channel * p.in_channel;

  // The pixel that each column of the thread meets for h = 0, in a row of the unit's part of x. The
  // same in every unit: tiles begin where blocks and vectors do.
  int pixels[kOwn];
  const int pad = p.padding_x - p.by_stride_x(p.padding_x) * p.stride_x;
#pragma unroll
  for (int j = 0; j < kOwn; ++j)
    pixels[j] = p.by_stride_x(kOwn * role.lane + j + pad) + kReachX - 1;

  T* const own_ring = ring + threadIdx.x * kOwn;
  const int step_size = kRows * apart, own_rows = p.stride_y - role.row_group * kRows;
  const int64_t row_step = p.stride_y * p.out_pitch;
  float sums[kRows][kReachY][kReachX][kOwn] = {};
  double bias = 0.;
#pragma unroll 1
  for (int n = 0; n < p.each; ++n) {
    const int number = (n * p.shares + share) * p.teams + role.team;
    const bool there = active && number < p.units;
    const DepthwisePart part(p, there ? number : 0);
    const int oz = part.z * p.stride_z - p.padding_z + kz * p.dilation_z;
    const int columns = p.out_w - part.x - kOwn * role.lane;
    const bool met = there && below(oz, p.out_d);
    int oy = part.b * p.stride_y + role.row_group * kRows - p.padding_y, ahead = 0, fill = 0;
    const T* gy = gy_channel + part.image * image_outputs +
                  (static_cast<int64_t>(oz) * p.out_h + oy) * p.out_pitch + part.x +
                  kOwn * role.lane;
    const int limit = met && columns > 0 ? p.out_h : 0;
    const auto issue = [&] {
      if (ahead < p.strip) {
        bool inside[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) inside[i] = i < own_rows && below(oy + i, limit);
        bring_rows<kRows>(p.vector, gy, p.out_pitch, own_ring + fill, apart, inside, columns);
      }
      ptx::copy_async_commit();
      ++ahead;
      oy += p.stride_y;
      gy += row_step;
      fill = fill < (kStages - 1) * step_size ? fill + step_size : 0;
    };
#pragma unroll 1
    for (int i = 1; i < kStages; ++i) issue();
    const T* const x_plane =
        x_channel + part.image * image_inputs + static_cast<int64_t>(part.z) * p.in_h * p.in_w;
    place_input(p, role, part, met && part.z < p.in_d, x_plane, x_place);
    __syncthreads();

    float x[kReachY][kReachX][kOwn];  // of the blocks' row, and of the one before
    const float* from = x_place;
    const auto read_input = [&](float (&row)[kReachX][kOwn]) {
#pragma unroll
      for (int h = 0; h < kReachX; ++h) {
#pragma unroll
        for (int j = 0; j < kOwn; ++j) row[h][j] = from[pixels[j] - h];
      }
      from += p.x_columns;
    };
    if constexpr (kReachY == 2) read_input(x[1]);
    int take = 0;
#pragma unroll 2
    for (int b = 0; b < p.strip; ++b) {
      issue();
      ptx::copy_async_wait<kStages - 1>();
      float gy_own[kRows][kOwn];
#pragma unroll
      for (int i = 0; i < kRows; ++i) read_own(own_ring + take + i * apart, gy_own[i]);
      take = take < (kStages - 1) * step_size ? take + step_size : 0;
      read_input(x[0]);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int hy = 0; hy < kReachY; ++hy) {
#pragma unroll
          for (int hx = 0; hx < kReachX; ++hx) {
#pragma unroll
            for (int j = 0; j < kOwn; ++j) sums[i][hy][hx][j] += gy_own[i][j] * x[hy][hx][j];
          }
        }
      }
      if (adds_bias) {
        if constexpr (sizeof(T) == 4) {
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            bias += (static_cast<double>(gy_own[i][0]) + gy_own[i][1]) +
                    (static_cast<double>(gy_own[i][2]) + gy_own[i][3]);
          }
        } else {  // of a few short numbers, a float has room for the sum
          float few[kRows];
#pragma unroll
          for (int i = 0; i < kRows; ++i)
            few[i] = (gy_own[i][0] + gy_own[i][1]) + (gy_own[i][2] + gy_own[i][3]);
          bias += kRows == 2 ? few[0] + few[kRows - 1] : few[0];
        }
      }
      if constexpr (kReachY == 2) {
#pragma unroll
        for (int h = 0; h < kReachX; ++h) {
#pragma unroll
          for (int j = 0; j < kOwn; ++j) x[1][h][j] = x[0][h][j];
        }
      }
    }
    ptx::copy_async_wait<0>();
    __syncthreads();
  }

  // --- What the thread block has
  const bool direct = p.shares == 1 && !(p.sums && p.stride_z > 1);
  double* const bias_sums = static_cast<double*>(p.workspace);
  const int bias_parts = p.shares * p.stride_z;
  if (adds_bias) {
    const int all = p.teams * team_threads;
    const int index = threadIdx.x - role.channel * all;
    const double sum = add_neighbours(all, index, reinterpret_cast<double*>(raw_memory), bias);
    if (index == 0 && active) {
      if (direct) {
        static_cast<T*>(p.bias)[channel] = narrow<T>(static_cast<float>(sum));
      } else {
        bias_sums[static_cast<int64_t>(channel) * bias_parts + kz * p.shares + share] = sum;
      }
    }
    __syncthreads();
  }
  float* const shared = reinterpret_cast<float*>(raw_memory);
  const int class_lanes = p.period / kOwn, lane_member = p.by_classes(role.lane);
  const int class_of = (role.channel * p.row_groups + role.row_group) * class_lanes + role.lane -
                       lane_member * class_lanes;
  const int each = p.by_classes(p.lanes), member = role.team * each + lane_member;
  float (&flat)[kSums] = reinterpret_cast<float (&)[kSums]>(sums);
  add_members(p.teams * each, p.block_channels * p.row_groups * class_lanes, member, class_of,
              shared, flat);
  if (member == 0) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) shared[class_of * kSums + i] = flat[i];
  }
  __syncthreads();
  float* const weight_sums = reinterpret_cast<float*>(
      bias_sums + (p.sums ? static_cast<int64_t>(p.channels) * bias_parts : 0));
  for (int i = threadIdx.x; i < p.block_channels * p.taps; i += p.threads) {
    const int of = p.by_taps(i), tap = i - of * p.taps;
    const int channel_of = channels * p.block_channels + of;
    if (channel_of >= p.channels) continue;
    const TapPlace<kRows, kReachY, kReachX> place(p, of, tap);
    float sum = 0.f;
    for (int q = place.column; q < p.period; q += p.stride_x)
      sum += shared[(place.class_of + q / kOwn) * kSums + place.index * kOwn + q % kOwn];
    const int64_t kernel = static_cast<int64_t>(channel_of) * p.kernel_z + kz;
    if (direct) {
      static_cast<T*>(p.result)[kernel * p.taps + tap] = narrow<T>(sum);
    } else {
      weight_sums[(kernel * p.shares + share) * p.taps + tap] = sum;
    }
  }
}

// --- The sum of all shares -------------------------------------------------------------------

constexpr int kDepthwiseAddThreads = 128, kDepthwiseBatch = 8;

template <typename T>
__global__ void __launch_bounds__(kDepthwiseAddThreads)
    depthwise_wgrad_add(const __grid_constant__ DepthwiseParams p) {
  const int bias_parts = p.sums ? p.shares * p.stride_z : 0;
  const double* const bias_sums = static_cast<const double*>(p.workspace);
  const int index = static_cast<int>(blockIdx.x) * kDepthwiseAddThreads + threadIdx.x;
  const int weights = p.channels * p.kernel_z * p.taps;
  if (index < weights) {
    const int kernel = p.by_taps(index), tap = index - kernel * p.taps;
    const float* const from =
        reinterpret_cast<const float*>(bias_sums + static_cast<int64_t>(p.channels) * bias_parts) +
        static_cast<int64_t>(kernel) * p.shares * p.taps + tap;
    const float sum = ordered_sum<kDepthwiseBatch, float>(
        0, p.shares, 1, [&](int i) { return from[static_cast<int64_t>(i) * p.taps]; });
    static_cast<T*>(p.result)[index] = narrow<T>(sum);
  } else if (p.sums && index - weights < p.channels) {
    const int channel = index - weights;
    const double* const from = bias_sums + static_cast<int64_t>(channel) * bias_parts;
    const double sum =
        ordered_sum<kDepthwiseBatch, double>(0, bias_parts, 1, [&](int i) { return from[i]; });
    static_cast<T*>(p.bias)[channel] = narrow<T>(static_cast<float>(sum));
  }
}

}  // namespace upconv::direct
