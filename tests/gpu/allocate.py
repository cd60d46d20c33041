"""A program that takes GPU memory by CUDA's driver library alone: `python allocate.py DEVICE BYTES`.

It prints the device's UUID once CUDA is up, and `free total` as CUDA tells them; then, for each line it reads, takes
BYTES more and prints `free total` again. What it took is given back when it ends.
"""

import ctypes
import sys


def call(cuda: ctypes.CDLL, function: str, *arguments: object) -> None:
    """Call it, or end with CUDA's error number."""
    code = getattr(cuda, function)(*arguments)
    if code:
        sys.exit(f"{function} failed with CUDA error {code}")


def main() -> None:
    """See the module's docstring."""
    device_number, size = int(sys.argv[1]), int(sys.argv[2])
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    uuid, pointer = (ctypes.c_ubyte * 16)(), ctypes.c_uint64()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    call(cuda, "cuInit", 0)
    call(cuda, "cuDeviceGet", ctypes.byref(device), device_number)
    call(cuda, "cuDeviceGetUuid_v2", uuid, device)
    call(cuda, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call(cuda, "cuCtxSetCurrent", context)
    text = bytes(uuid).hex()
    print("-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:])))
    while True:
        call(cuda, "cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        print(free.value, total.value, flush=True)
        if not sys.stdin.readline():
            return
        call(cuda, "cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))


if __name__ == "__main__":
    main()
