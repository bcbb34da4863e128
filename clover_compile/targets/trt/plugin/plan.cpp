#include "plan.h"

#include <algorithm>
#include <limits>

namespace clover {

namespace {

constexpr int64_t kGRID[3]{2147483647, 65535, 65535};
constexpr int64_t kSHARED = 232448;
constexpr std::size_t kALIGNMENT = 256;
constexpr int64_t kMOST_BYTES = int64_t{1} << 40;
// Sizes of one symbol that are all tried when the workspace is measured.
constexpr int64_t kTRIED = 1024;

std::vector<Operand> readOperands(Json const& json) {
    std::vector<Operand> made;
    for (auto const& entry : json.array()) {
        Operand operand;
        operand.name = entry["name"].string();
        operand.dtype = entry["dtype"].string();
        itemsize(operand.dtype);
        for (auto const& size : entry["shape"].array()) operand.shape.push_back(Expression::of(size));
        if (operand.shape.size() > 8) throw Fault(operand.name + " has more than 8 dimensions");
        made.push_back(std::move(operand));
    }
    return made;
}

std::size_t bytesOf(Operand const& operand, Symbols const& symbols) {
    int64_t bytes = static_cast<int64_t>(itemsize(operand.dtype));
    for (int64_t const size : operand.sizes(symbols)) {
        if (__builtin_mul_overflow(bytes, size, &bytes) || bytes > kMOST_BYTES)
            throw Fault(operand.name + " is too large");
    }
    return static_cast<std::size_t>(bytes);
}

std::size_t reserve(std::size_t& total, std::size_t bytes) {
    std::size_t const at = total;
    total += (bytes + kALIGNMENT - 1) / kALIGNMENT * kALIGNMENT;
    return at;
}

std::string text(Shape const& shape) {
    std::string made = "[";
    for (auto const size : shape) made += (made.size() > 1 ? ", " : "") + std::to_string(size);
    return made + "]";
}

}  // namespace

std::size_t itemsize(std::string const& dtype) {
    static std::map<std::string, std::size_t> const kSIZES{{"fp64", 8}, {"fp32", 4}, {"bf16", 2},
        {"fp16", 2}, {"fp8e4nv", 1}, {"i64", 8}, {"i32", 4}, {"i8", 1}, {"i1", 1}};
    auto const found = kSIZES.find(dtype);
    if (found == kSIZES.end()) throw Fault("the launch plan has an array of dtype '" + dtype + "'");
    return found->second;
}

Shape Operand::sizes(Symbols const& symbols) const {
    Shape made;
    for (auto const& size : shape) {
        made.push_back(size.evaluate(symbols));
        if (made.back() < 0) throw Fault(name + " would have a negative size: " + text(made));
    }
    return made;
}

Plan::Plan(std::string_view json, std::string_view cubins) {
    Json const root = Json::parse(json);
    op = root["op"].string();
    inputs = readOperands(root["inputs"]);
    outputs = readOperands(root["outputs"]);
    auto const& rows = root["outputs"].array();
    for (std::size_t i = 0; i < rows.size(); ++i) {
        Json const& alias = rows[i]["alias"];
        if (!alias.isNull())
            outputs[i].alias = static_cast<int>(alias.count(static_cast<int64_t>(inputs.size()) - 1));
    }
    if (outputs.empty()) throw Fault(op + " has no outputs");
    checkAliases();
    readKernels(root["kernels"], cubins);
    for (auto const& entry : root["targets"].array()) targets.push_back(readTarget(entry));
    if (targets.empty()) throw Fault(op + " has kernels for no GPU");
    checkNames();
}

void Plan::checkAliases() const {
    for (auto const& output : outputs) {
        if (output.alias < 0) continue;
        auto const& input = inputs[static_cast<std::size_t>(output.alias)];
        Symbols const none;
        if (input.dtype != output.dtype || input.sizes(none) != output.sizes(none))
            throw Fault(op + ": " + output.name + " cannot take the memory of " + input.name);
    }
}

void Plan::checkNames() const {
    std::set<std::string> known, used;
    for (auto const& input : inputs) {
        for (auto const& size : input.shape) {
            bool const plain = size.kind == Expression::Kind::number || size.kind == Expression::Kind::name;
            if (!plain) throw Fault(op + ": " + input.name + " has a size that is no symbol");
            size.names(known);
        }
    }
    auto const look = [&used](Operand const& operand) {
        for (auto const& size : operand.shape) size.names(used);
    };
    for (auto const& output : outputs) look(output);
    for (auto const& target : targets) {
        for (auto const& variant : target.variants) {
            variant.guard.names(used);
            for (auto const& operand : variant.scratch) look(operand);
            for (auto const& launch : variant.launches) {
                for (auto const& axis : launch.grid) axis.names(used);
                for (auto const& argument : launch.arguments) argument.value.names(used);
            }
        }
    }
    for (auto const& name : used)
        if (known.count(name) == 0) throw Fault(op + ": no input gives " + name + " a value");
}

void Plan::readKernels(Json const& json, std::string_view cubins) {
    std::size_t at = 0;
    for (auto const& entry : json.array()) {
        Kernel kernel;
        kernel.function = entry["function"].string();
        auto const size = static_cast<std::size_t>(entry["bytes"].count(int64_t{1} << 30));
        if (size > cubins.size() - at) {
            throw Fault(op + ": the kernels are cut off: " + kernel.function + " ends at byte "
                + std::to_string(at + size) + " of " + std::to_string(cubins.size()));
        }
        kernel.cubin = cubins.substr(at, size);
        if (kernel.cubin.substr(0, 4) != "\177ELF") throw Fault(kernel.function + " is no cubin");
        kernel.warps = static_cast<unsigned>(entry["warps"].count(32));
        kernel.shared = static_cast<unsigned>(entry["shared"].count(kSHARED));
        if (kernel.warps == 0) throw Fault(kernel.function + " has no warps");
        at += size;
        kernels.push_back(kernel);
    }
    if (at != cubins.size()) {
        throw Fault(op + ": the kernels end at byte " + std::to_string(at) + " of "
            + std::to_string(cubins.size()));
    }
}

Target Plan::readTarget(Json const& json) const {
    Target made;
    made.capability = static_cast<int>(json["capability"].count(1000));
    for (auto const& entry : json["variants"].array()) {
        Variant variant;
        variant.guard = Expression::parse(entry["guard"].string());
        variant.scratch = readOperands(entry["scratch"]);
        for (auto const& launch : entry["launches"].array())
            variant.launches.push_back(readLaunch(launch, variant));
        made.variants.push_back(std::move(variant));
    }
    if (made.variants.empty()) throw Fault(op + " has no variants");
    return made;
}

Launch Plan::readLaunch(Json const& json, Variant const& variant) const {
    Launch made;
    made.kernel = static_cast<std::size_t>(json["kernel"].count(static_cast<int64_t>(kernels.size()) - 1));
    auto const& grid = json["grid"].array();
    if (grid.size() != 3) throw Fault(op + ": a grid has three axes");
    for (std::size_t i = 0; i < 3; ++i) made.grid[i] = Expression::of(grid[i]);
    std::map<std::string, std::pair<Argument::Kind, std::size_t>> const kinds{
        {"input", {Argument::Kind::input, inputs.size()}},
        {"output", {Argument::Kind::output, outputs.size()}},
        {"scratch", {Argument::Kind::scratch, variant.scratch.size()}},
        {"integer", {Argument::Kind::integer, 0}}};
    for (auto const& entry : json["arguments"].array()) {
        if (entry.array().size() != 2) throw Fault(op + ": an argument is a kind and a value");
        auto const found = kinds.find(entry.array()[0].string());
        if (found == kinds.end()) throw Fault(op + ": an argument of unknown kind");
        Argument argument;
        argument.kind = found->second.first;
        Json const& value = entry.array()[1];
        if (argument.kind == Argument::Kind::integer)
            argument.value = Expression::of(value);
        else
            argument.index = static_cast<std::size_t>(
                value.count(static_cast<int64_t>(found->second.second) - 1));
        made.arguments.push_back(std::move(argument));
    }
    return made;
}

Target const& Plan::target(int capability) const {
    std::string known;
    for (auto const& target : targets) {
        if (target.capability == capability) return target;
        known += (known.empty() ? "" : ", ") + std::to_string(target.capability);
    }
    throw Fault(op + ": kernels for compute capability " + known + " (times ten), this GPU has "
        + std::to_string(capability) + ": build for it");
}

Symbols Plan::bind(Shapes const& shapes) const {
    if (shapes.size() != inputs.size()) {
        throw Fault(op + " takes " + std::to_string(inputs.size()) + " inputs, given "
            + std::to_string(shapes.size()));
    }
    Symbols symbols;
    for (std::size_t i = 0; i < shapes.size(); ++i) {
        auto const& planned = inputs[i].shape;
        auto const wrong = [&] { return op + ": " + inputs[i].name + ": given " + text(shapes[i]); };
        if (planned.size() != shapes[i].size())
            throw Fault(wrong() + ", planned with " + std::to_string(planned.size()) + " dimensions");
        for (std::size_t axis = 0; axis < planned.size(); ++axis) {
            int64_t const found = shapes[i][axis];
            int64_t meant = planned[axis].number;
            if (planned[axis].kind == Expression::Kind::name)
                meant = symbols.emplace(planned[axis].name, found).first->second;
            if (found != meant || found < 0)
                throw Fault(wrong() + ", planned " + std::to_string(meant) + " at axis "
                    + std::to_string(axis));
        }
    }
    return symbols;
}

Call Plan::resolve(Target const& target, Symbols const& symbols) const {
    Call call;
    for (auto const& variant : target.variants) {
        if (variant.guard.evaluate(symbols) == 0) continue;
        call.variant = &variant;
        break;
    }
    if (call.variant == nullptr) throw Fault(op + ": a call outside every variant's guard");
    call.empty = true;
    for (auto const& operand : call.variant->scratch)
        call.scratch.push_back(reserve(call.workspace, bytesOf(operand, symbols)));
    for (auto const& output : outputs) {
        std::size_t const bytes = bytesOf(output, symbols);
        call.empty = call.empty && bytes == 0;
        call.outputBytes.push_back(bytes);
        call.staged.push_back(output.alias < 0 ? 0 : reserve(call.workspace, bytes));
    }
    if (call.empty) return call;
    for (auto const& launch : call.variant->launches) {
        std::array<unsigned, 3> grid{};
        for (std::size_t axis = 0; axis < 3; ++axis) {
            int64_t const programs = launch.grid[axis].evaluate(symbols);
            if (programs < 1 || programs > kGRID[axis]) {
                throw Fault(op + ": " + kernels[launch.kernel].function + ": a grid of "
                    + std::to_string(programs) + " along axis " + std::to_string(axis));
            }
            grid[axis] = static_cast<unsigned>(programs);
        }
        call.grids.push_back(grid);
        call.integers.emplace_back();
        for (auto const& argument : launch.arguments) {
            if (argument.kind != Argument::Kind::integer) continue;
            int64_t const value = argument.value.evaluate(symbols);
            if (value < std::numeric_limits<int32_t>::min() || value > std::numeric_limits<int32_t>::max())
                throw Fault(op + ": an argument leaves 32 bits");
            call.integers.back().push_back(static_cast<int32_t>(value));
        }
    }
    return call;
}

std::size_t Plan::workspaceWithin(Shapes const& least, Shapes const& most) const {
    Symbols const low = bind(least), high = bind(most);
    std::vector<Symbols> tried{high};
    // A variant may need less than another one for fewer rows: every size of a short range counts.
    for (auto const& [name, end] : high) {
        std::vector<Symbols> next;
        int64_t const start = low.at(name);
        for (auto const& symbols : tried) {
            Symbols copy = symbols;
            bool const all = end - start < kTRIED && tried.size() < 8;
            for (int64_t value = start; value <= end; value = all || value == end ? value + 1 : end) {
                copy[name] = value;
                next.push_back(copy);
            }
        }
        tried = std::move(next);
    }
    std::size_t bytes = 0;
    for (auto const& target : targets)
        for (auto const& symbols : tried) bytes = std::max(bytes, resolve(target, symbols).workspace);
    return bytes;
}

}  // namespace clover
