// The few calls of the CUDA driver the plugin makes, opened when a kernel is first needed: the
// library loads, and engines are built, on machines without a driver.
#pragma once

#include <cstddef>
#include <string_view>

#include "plan.h"

namespace clover {

class Driver {
public:
    // Opens libcuda once; a Fault if there is none.
    static Driver& get();

    // Compute capability times ten of the current context's device.
    int capability();
    // The kernel's function in the current context; its module is loaded once per context.
    void* function(Kernel const& kernel);
    void launch(Kernel const& kernel, void* function, unsigned const grid[3], void** arguments, void* stream);
    void copy(void* target, void const* source, std::size_t bytes, void* stream);

private:
    Driver();
    struct Calls;
    Calls* mCalls;
};

}  // namespace clover
