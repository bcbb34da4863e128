// The launch plan of one node, read from its attributes, and what one call of it launches.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "expression.h"

namespace clover {

using Shape = std::vector<int64_t>;
using Shapes = std::vector<Shape>;

// An array of the node, or scratch memory.
struct Operand {
    std::string name;
    // As plans spell it.
    std::string dtype;
    std::vector<Expression> shape;
    // Outputs: the input whose memory it takes over, or -1.
    int alias{-1};

    Shape sizes(Symbols const& symbols) const;
};

struct Argument {
    enum class Kind { input, output, scratch, integer };
    Kind kind{};
    std::size_t index{};
    Expression value;
};

struct Launch {
    std::size_t kernel{};
    std::array<Expression, 3> grid;
    // In the kernel's order.
    std::vector<Argument> arguments;
};

struct Variant {
    Expression guard;
    std::vector<Operand> scratch;
    std::vector<Launch> launches;
};

// The variants for GPUs of one compute capability.
struct Target {
    int capability{};
    std::vector<Variant> variants;
};

struct Kernel {
    std::string function;
    std::string_view cubin;
    unsigned warps{};
    unsigned shared{};
};

// A call with every size filled in.
struct Call {
    Variant const* variant{};
    std::vector<std::array<unsigned, 3>> grids;
    // Values of each launch's integer arguments, in order.
    std::vector<std::vector<int32_t>> integers;
    // Bytes into the workspace.
    std::vector<std::size_t> scratch;
    // Outputs that take over an input's memory are written here first: kernels may not share
    // memory between inputs and outputs. Bytes into the workspace; unused for other outputs.
    std::vector<std::size_t> staged;
    std::vector<std::size_t> outputBytes;
    std::size_t workspace{};
    // Nothing to launch: every output is empty.
    bool empty{};
};

class Plan {
public:
    // Reads and checks a plan; `cubins` holds its kernels one after the other and must outlive it.
    Plan(std::string_view json, std::string_view cubins);

    std::string op;
    std::vector<Operand> inputs, outputs;
    std::vector<Kernel> kernels;
    std::vector<Target> targets;

    Target const& target(int capability) const;
    // The symbols' values from the shapes of the inputs, each checked.
    Symbols bind(Shapes const& shapes) const;
    Call resolve(Target const& target, Symbols const& symbols) const;
    // The largest workspace of any call whose input shapes lie between these, for any target.
    std::size_t workspaceWithin(Shapes const& least, Shapes const& most) const;

private:
    Target readTarget(Json const& json) const;
    Launch readLaunch(Json const& json, Variant const& variant) const;
    void readKernels(Json const& json, std::string_view cubins);
    void checkAliases() const;
    void checkNames() const;
};

// Bytes per element of a dtype; a Fault for one that is unknown.
std::size_t itemsize(std::string const& dtype);

}  // namespace clover
