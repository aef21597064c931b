// Makes csrc/cuda/ops.cpp serve CPU tensors. Whether a small array counts as lying on the host can be chosen, as both
// lie in the same memory here.
#pragma once

inline bool harness_small_arrays_on_host = true;
#define GRADACC_DEVICE_TYPE c10::DeviceType::CPU
#define GRADACC_LIES_ON_HOST(tensor) ((tensor).defined() && harness_small_arrays_on_host)
