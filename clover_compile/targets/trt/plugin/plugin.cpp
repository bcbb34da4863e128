#include "plugin.h"

#include <cstring>
#include <mutex>

namespace clover {

using namespace nvinfer1;

namespace {

ILoggerFinder* gLoggerFinder = nullptr;

std::mutex gLock;
std::string gFault;

// Engines only say that a plugin failed: the reason is kept for whoever asks, and logged if the
// engine handed out a logger.
void complain(std::string const& words) noexcept {
    {
        std::lock_guard<std::mutex> const guard(gLock);
        gFault = words;
    }
    ILogger* const logger = gLoggerFinder == nullptr ? nullptr : gLoggerFinder->findLogger();
    if (logger != nullptr) logger->log(ILogger::Severity::kERROR, words.c_str());
}

// Runs `work`; what it throws goes to the log, and `failed` is returned.
template <typename Result, typename Work>
Result guarded(Result failed, Work&& work) noexcept {
    try {
        return work();
    } catch (std::exception const& error) {
        complain(error.what());
        return failed;
    }
}

// fp64 arrays travel as int64 with the same bits: engines have no fp64.
DataType engineType(std::string const& dtype) {
    static std::map<std::string, DataType> const kTYPES{{"fp64", DataType::kINT64},
        {"fp32", DataType::kFLOAT}, {"bf16", DataType::kBF16}, {"fp16", DataType::kHALF},
        {"fp8e4nv", DataType::kFP8}, {"i64", DataType::kINT64}, {"i32", DataType::kINT32},
        {"i8", DataType::kINT8}, {"i1", DataType::kBOOL}};
    auto const found = kTYPES.find(dtype);
    if (found == kTYPES.end()) throw Fault("an engine has no arrays of dtype " + dtype);
    return found->second;
}

Shape shapeOf(Dims const& dims) { return Shape(dims.d, dims.d + std::max(0, dims.nbDims)); }

template <typename Desc, typename Get>
Shapes shapesOf(Desc const* described, int32_t count, Get&& get) {
    Shapes made;
    for (int32_t i = 0; i < count; ++i) made.push_back(shapeOf(get(described[i])));
    return made;
}

// The kernels were promised this alignment; without it they would fault on the device.
void const* aligned(void const* address, Operand const& operand) {
    if (reinterpret_cast<std::uintptr_t>(address) % 16 != 0)
        throw Fault(operand.name + " does not start at a multiple of 16 bytes");
    return address;
}

void checkCount(Plan const& plan, int32_t inputs, int32_t outputs) {
    if (inputs != static_cast<int32_t>(plan.inputs.size()) || outputs != static_cast<int32_t>(plan.outputs.size())) {
        throw Fault(plan.op + " takes " + std::to_string(plan.inputs.size()) + " inputs and gives "
            + std::to_string(plan.outputs.size()) + " outputs, the node has " + std::to_string(inputs)
            + " and " + std::to_string(outputs));
    }
}

}  // namespace

IPluginCapability* TritonKernel::getCapabilityInterface(PluginCapabilityType type) noexcept {
    switch (type) {
    case PluginCapabilityType::kCORE: return static_cast<IPluginV3OneCore*>(this);
    case PluginCapabilityType::kBUILD: return static_cast<IPluginV3OneBuildV2*>(this);
    case PluginCapabilityType::kRUNTIME: return static_cast<IPluginV3OneRuntime*>(this);
    }
    return nullptr;
}

IPluginV3* TritonKernel::clone() noexcept {
    return guarded<IPluginV3*>(nullptr, [this] { return new TritonKernel(mContents, mWorkspace, mBuilding); });
}

int32_t TritonKernel::getNbOutputs() const noexcept {
    return static_cast<int32_t>(mContents->plan.outputs.size());
}

int32_t TritonKernel::getOutputDataTypes(
    DataType* types, int32_t outputs, DataType const* inputTypes, int32_t inputs) const noexcept {
    return guarded(1, [&] {
        auto const& plan = mContents->plan;
        checkCount(plan, inputs, outputs);
        for (int32_t i = 0; i < inputs; ++i) {
            auto const& planned = plan.inputs[static_cast<std::size_t>(i)];
            if (inputTypes[i] != engineType(planned.dtype)) {
                throw Fault(plan.op + ": " + planned.name + " is planned as " + planned.dtype
                    + ", given type " + std::to_string(static_cast<int>(inputTypes[i])));
            }
        }
        for (int32_t i = 0; i < outputs; ++i)
            types[i] = engineType(plan.outputs[static_cast<std::size_t>(i)].dtype);
        return 0;
    });
}

int32_t TritonKernel::getOutputShapes(DimsExprs const* inputs, int32_t inputCount, DimsExprs const*,
    int32_t shapeInputCount, DimsExprs* outputs, int32_t outputCount, IExprBuilder& builder) noexcept {
    return guarded(1, [&] {
        auto const& plan = mContents->plan;
        checkCount(plan, inputCount + shapeInputCount, outputCount);
        Dimensions symbols;
        for (std::size_t i = 0; i < plan.inputs.size(); ++i) {
            auto const& planned = plan.inputs[i].shape;
            if (inputs[i].nbDims != static_cast<int32_t>(planned.size())) {
                throw Fault(plan.op + ": " + plan.inputs[i].name + " has " + std::to_string(inputs[i].nbDims)
                    + " dimensions, planned with " + std::to_string(planned.size()));
            }
            for (std::size_t axis = 0; axis < planned.size(); ++axis) {
                auto const* given = inputs[i].d[axis];
                if (planned[axis].kind == Expression::Kind::name) {
                    // The engine may know one of two equal sizes and not yet the other.
                    auto const* known = symbols.emplace(planned[axis].name, given).first->second;
                    if (!known->isConstant() && given->isConstant()) symbols[planned[axis].name] = given;
                } else if (given->isConstant() && given->getConstantValue() != planned[axis].number) {
                    throw Fault(plan.op + ": " + plan.inputs[i].name + " has "
                        + std::to_string(given->getConstantValue()) + " at axis " + std::to_string(axis)
                        + ", planned " + std::to_string(planned[axis].number));
                }
            }
        }
        for (std::size_t i = 0; i < plan.outputs.size(); ++i) {
            auto const& planned = plan.outputs[i].shape;
            outputs[i].nbDims = static_cast<int32_t>(planned.size());
            for (std::size_t axis = 0; axis < planned.size(); ++axis) {
                outputs[i].d[axis] = planned[axis].build(symbols, builder);
                if (outputs[i].d[axis] == nullptr)
                    throw Fault(plan.op + ": " + plan.outputs[i].name + " has a size no engine can express");
            }
        }
        return 0;
    });
}

bool TritonKernel::supportsFormatCombination(
    int32_t position, DynamicPluginTensorDesc const* described, int32_t inputs, int32_t outputs) noexcept {
    return guarded(false, [&] {
        auto const& plan = mContents->plan;
        checkCount(plan, inputs, outputs);
        auto const& operand = position < inputs ? plan.inputs[static_cast<std::size_t>(position)]
                                                : plan.outputs[static_cast<std::size_t>(position - inputs)];
        auto const& desc = described[position].desc;
        return desc.format == TensorFormat::kLINEAR && desc.type == engineType(operand.dtype);
    });
}

int32_t TritonKernel::configurePlugin(DynamicPluginTensorDesc const* in, int32_t inputs,
    DynamicPluginTensorDesc const*, int32_t outputs) noexcept {
    return guarded(1, [&] {
        checkCount(mContents->plan, inputs, outputs);
        auto const most = shapesOf(in, inputs, [](auto const& x) { return x.max; });
        mContents->plan.bind(most);
        return 0;
    });
}

std::size_t TritonKernel::getWorkspaceSize(DynamicPluginTensorDesc const* in, int32_t inputs,
    DynamicPluginTensorDesc const*, int32_t) const noexcept {
    return guarded<std::size_t>(0, [&] {
        auto const least = shapesOf(in, inputs, [](auto const& x) { return x.min; });
        auto const most = shapesOf(in, inputs, [](auto const& x) { return x.max; });
        std::size_t const bytes = mContents->plan.workspaceWithin(least, most);
        const_cast<TritonKernel*>(this)->mWorkspace = static_cast<int64_t>(bytes);
        return bytes;
    });
}

int32_t TritonKernel::getAliasedInput(int32_t output) noexcept {
    auto const& outputs = mContents->plan.outputs;
    if (output < 0 || output >= static_cast<int32_t>(outputs.size())) return -1;
    return outputs[static_cast<std::size_t>(output)].alias;
}

void TritonKernel::prepare(Shapes const& shapes) {
    if (mReady && shapes == mShapes) return;
    mReady = false;
    auto const& plan = mContents->plan;
    if (mCapability == 0) mCapability = Driver::get().capability();
    mCall = plan.resolve(plan.target(mCapability), plan.bind(shapes));
    if (mWorkspace >= 0 && static_cast<int64_t>(mCall.workspace) > mWorkspace) {
        throw Fault(plan.op + ": a call needs " + std::to_string(mCall.workspace)
            + " bytes of workspace, the engine was built with " + std::to_string(mWorkspace));
    }
    mShapes = shapes;
    mReady = true;
}

int32_t TritonKernel::onShapeChange(
    PluginTensorDesc const* in, int32_t inputs, PluginTensorDesc const*, int32_t outputs) noexcept {
    return guarded(1, [&] {
        checkCount(mContents->plan, inputs, outputs);
        if (!mBuilding) prepare(shapesOf(in, inputs, [](auto const& x) { return x.dims; }));
        return 0;
    });
}

int32_t TritonKernel::enqueue(PluginTensorDesc const* inputDesc, PluginTensorDesc const*,
    void const* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream) noexcept {
    return guarded(1, [&] {
        if (mBuilding) return 0;
        auto const& plan = mContents->plan;
        prepare(shapesOf(inputDesc, static_cast<int32_t>(plan.inputs.size()), [](auto const& x) { return x.dims; }));
        if (mCall.empty) return 0;
        auto* const bytes = static_cast<char*>(workspace);
        std::vector<void*> written;
        for (std::size_t i = 0; i < plan.outputs.size(); ++i)
            written.push_back(plan.outputs[i].alias < 0 ? outputs[i] : bytes + mCall.staged[i]);
        for (std::size_t i = 0; i < mCall.variant->launches.size(); ++i)
            launch(mCall.variant->launches[i], i, inputs, written, bytes, stream);
        for (std::size_t i = 0; i < plan.outputs.size(); ++i)
            if (plan.outputs[i].alias >= 0 && mCall.outputBytes[i] > 0)
                Driver::get().copy(outputs[i], written[i], mCall.outputBytes[i], stream);
        return 0;
    });
}

void TritonKernel::launch(Launch const& launch, std::size_t number, void const* const* inputs,
    std::vector<void*> const& outputs, char* workspace, cudaStream_t stream) {
    auto const& kernel = mContents->plan.kernels[launch.kernel];
    std::vector<void const*> addresses;
    std::vector<void*> arguments;
    // Triton appends two pointers to scratch memory, which these kernels do not use.
    addresses.reserve(launch.arguments.size() + 2);
    std::size_t integer = 0;
    auto const& plan = mContents->plan;
    for (auto const& argument : launch.arguments) {
        switch (argument.kind) {
        case Argument::Kind::input:
            addresses.push_back(aligned(inputs[argument.index], plan.inputs[argument.index]));
            break;
        case Argument::Kind::output:
            addresses.push_back(aligned(outputs[argument.index], plan.outputs[argument.index]));
            break;
        case Argument::Kind::scratch: addresses.push_back(workspace + mCall.scratch[argument.index]); break;
        case Argument::Kind::integer:
            arguments.push_back(&mCall.integers[number][integer++]);
            continue;
        }
        arguments.push_back(&addresses.back());
    }
    for (int i = 0; i < 2; ++i) {
        addresses.push_back(nullptr);
        arguments.push_back(&addresses.back());
    }
    auto& driver = Driver::get();
    driver.launch(kernel, driver.function(kernel), mCall.grids[number].data(), arguments.data(), stream);
}

IPluginV3* TritonKernel::attachToContext(IPluginResourceContext*) noexcept {
    return guarded<IPluginV3*>(nullptr, [this] {
        auto made = std::make_unique<TritonKernel>(mContents, mWorkspace, mBuilding);
        if (!mBuilding) {
            // Modules are loaded here: it must not happen while a CUDA graph is recorded.
            auto& driver = Driver::get();
            made->mCapability = driver.capability();
            for (auto const& variant : mContents->plan.target(made->mCapability).variants)
                for (auto const& launch : variant.launches) driver.function(mContents->plan.kernels[launch.kernel]);
        }
        return made.release();
    });
}

PluginFieldCollection const* TritonKernel::getFieldsToSerialize() noexcept {
    return guarded<PluginFieldCollection const*>(nullptr, [this] {
        auto const bytes = [](std::string const& x) { return static_cast<int32_t>(x.size()); };
        mFields = {{kPLAN, mContents->text.data(), PluginFieldType::kINT8, bytes(mContents->text)},
            {kCUBINS, mContents->cubins.data(), PluginFieldType::kINT8, bytes(mContents->cubins)},
            {kWORKSPACE, &mWorkspace, PluginFieldType::kINT64, 1}};
        mCollection = {static_cast<int32_t>(mFields.size()), mFields.data()};
        return &mCollection;
    });
}

Creator::Creator()
    : mFields{{kPLAN, nullptr, PluginFieldType::kINT8, 1}, {kCUBINS, nullptr, PluginFieldType::kINT8, 1}} {
    mCollection = {static_cast<int32_t>(mFields.size()), mFields.data()};
}

IPluginV3* Creator::createPlugin(char const* name, PluginFieldCollection const* fields, TensorRTPhase phase) noexcept {
    return guarded<IPluginV3*>(nullptr, [&]() -> IPluginV3* {
        std::string const node = name == nullptr ? "" : name;
        try {
            std::map<std::string, std::string> found;
            int64_t workspace = -1;
            for (int32_t i = 0; fields != nullptr && i < fields->nbFields; ++i) {
                auto const& field = fields->fields[i];
                if (field.name == nullptr || field.data == nullptr || field.length < 0) continue;
                if (std::strcmp(field.name, kWORKSPACE) == 0 && field.type == PluginFieldType::kINT64)
                    std::memcpy(&workspace, field.data, sizeof workspace);
                else if (field.type == PluginFieldType::kINT8)
                    found[field.name].assign(static_cast<char const*>(field.data), static_cast<std::size_t>(field.length));
            }
            for (char const* wanted : {kPLAN, kCUBINS})
                if (found.count(wanted) == 0) throw Fault(std::string("attribute ") + wanted + " (int8) is missing");
            auto contents = std::make_shared<Contents const>(std::move(found[kPLAN]), std::move(found[kCUBINS]));
            return new TritonKernel(std::move(contents), workspace, phase == TensorRTPhase::kBUILD);
        } catch (std::exception const& error) {
            throw Fault("node " + node + ": " + error.what());
        }
    });
}

}  // namespace clover

#define CLOVER_EXPORT extern "C" __attribute__((visibility("default")))

CLOVER_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
    static clover::Creator creator;
    static nvinfer1::IPluginCreatorInterface* const creators[] = {&creator};
    count = 1;
    return creators;
}

CLOVER_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder* finder) { clover::gLoggerFinder = finder; }

// The last fault of this process, and forgets it; returns its length, 0 for none.
CLOVER_EXPORT int64_t clover_last_fault(char* text, int64_t room) {
    std::lock_guard<std::mutex> const guard(clover::gLock);
    std::strncpy(text, clover::gFault.c_str(), static_cast<std::size_t>(room - 1));
    text[room - 1] = 0;
    auto const length = static_cast<int64_t>(clover::gFault.size());
    clover::gFault.clear();
    return length;
}
