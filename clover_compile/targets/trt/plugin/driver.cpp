#include "driver.h"

#include <cuda.h>
#include <dlfcn.h>

#include <map>
#include <mutex>
#include <string>
#include <utility>

namespace clover {

namespace {

constexpr unsigned kSTATIC_SHARED = 48 * 1024;

}  // namespace

struct Driver::Calls {
    decltype(&cuCtxGetCurrent) ctxGetCurrent;
    decltype(&cuCtxGetDevice) ctxGetDevice;
    decltype(&cuDeviceGetAttribute) deviceGetAttribute;
    decltype(&cuModuleLoadData) moduleLoadData;
    decltype(&cuModuleGetFunction) moduleGetFunction;
    decltype(&cuFuncSetAttribute) funcSetAttribute;
    decltype(&cuLaunchKernel) launchKernel;
    decltype(&cuMemcpyDtoDAsync) memcpyDtoDAsync;
    decltype(&cuGetErrorString) getErrorString;

    std::mutex lock;
    // Equal cubins of many nodes are one module.
    std::map<std::pair<CUcontext, std::string>, CUfunction> functions;

    void check(CUresult status, char const* call) const {
        if (status == CUDA_SUCCESS) return;
        char const* words = nullptr;
        getErrorString(status, &words);
        throw Fault(std::string(call) + ": " + (words == nullptr ? "unknown error" : words));
    }
};

Driver& Driver::get() {
    static Driver driver;
    return driver;
}

Driver::Driver() : mCalls(nullptr) {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == nullptr) throw Fault("no CUDA driver (libcuda.so.1) on this machine");
    auto const find = [library](auto& call, char const* name) {
        call = reinterpret_cast<std::remove_reference_t<decltype(call)>>(dlsym(library, name));
        if (call == nullptr) throw Fault(std::string("the CUDA driver has no ") + name);
    };
    static Calls calls;
    find(calls.ctxGetCurrent, "cuCtxGetCurrent");
    find(calls.ctxGetDevice, "cuCtxGetDevice");
    find(calls.deviceGetAttribute, "cuDeviceGetAttribute");
    find(calls.moduleLoadData, "cuModuleLoadData");
    find(calls.moduleGetFunction, "cuModuleGetFunction");
    find(calls.funcSetAttribute, "cuFuncSetAttribute");
    find(calls.launchKernel, "cuLaunchKernel");
    find(calls.memcpyDtoDAsync, "cuMemcpyDtoDAsync_v2");
    find(calls.getErrorString, "cuGetErrorString");
    mCalls = &calls;
}

int Driver::capability() {
    CUdevice device{};
    mCalls->check(mCalls->ctxGetDevice(&device), "cuCtxGetDevice");
    int major = 0, minor = 0;
    mCalls->check(mCalls->deviceGetAttribute(
        &major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device), "cuDeviceGetAttribute");
    mCalls->check(mCalls->deviceGetAttribute(
        &minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device), "cuDeviceGetAttribute");
    return 10 * major + minor;
}

void* Driver::function(Kernel const& kernel) {
    CUcontext context{};
    mCalls->check(mCalls->ctxGetCurrent(&context), "cuCtxGetCurrent");
    std::lock_guard<std::mutex> const guard(mCalls->lock);
    auto& found = mCalls->functions[{context, std::string(kernel.cubin)}];
    if (found == nullptr) {
        CUmodule module{};
        CUfunction function{};
        mCalls->check(mCalls->moduleLoadData(&module, kernel.cubin.data()), "cuModuleLoadData");
        mCalls->check(mCalls->moduleGetFunction(&function, module, kernel.function.c_str()),
            "cuModuleGetFunction");
        if (kernel.shared > kSTATIC_SHARED) {
            mCalls->check(mCalls->funcSetAttribute(function,
                CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, static_cast<int>(kernel.shared)),
                "cuFuncSetAttribute");
        }
        found = function;
    }
    return found;
}

void Driver::launch(Kernel const& kernel, void* function, unsigned const grid[3], void** arguments,
    void* stream) {
    mCalls->check(mCalls->launchKernel(static_cast<CUfunction>(function), grid[0], grid[1], grid[2],
        32 * kernel.warps, 1, 1, kernel.shared, static_cast<CUstream>(stream), arguments, nullptr),
        "cuLaunchKernel");
}

void Driver::copy(void* target, void const* source, std::size_t bytes, void* stream) {
    mCalls->check(mCalls->memcpyDtoDAsync(reinterpret_cast<CUdeviceptr>(target),
        reinterpret_cast<CUdeviceptr>(source), bytes, static_cast<CUstream>(stream)),
        "cuMemcpyDtoDAsync");
}

}  // namespace clover
