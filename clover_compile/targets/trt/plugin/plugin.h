// The TensorRT plugin clover::TritonKernel: one node, whose attributes hold a launch plan and the
// cubins it names. The same class serves TensorRT and TensorRT-RTX.
#pragma once

#include <NvInferRuntime.h>

#include <memory>
#include <string>
#include <vector>

#include "driver.h"
#include "plan.h"

namespace clover {

constexpr char const* kNAME = "TritonKernel";
constexpr char const* kVERSION = "1";
constexpr char const* kNAMESPACE = "clover";

// Attributes of a node; all travel as bytes.
constexpr char const* kPLAN = "plan";
constexpr char const* kCUBINS = "cubins";
// Serialised with the engine: the workspace that was asked for when it was built.
constexpr char const* kWORKSPACE = "workspace";

// What clones share; the plan points into the bytes.
struct Contents {
    Contents(std::string planText, std::string cubinBytes)
        : text(std::move(planText)), cubins(std::move(cubinBytes)), plan(text, cubins) {}
    std::string const text, cubins;
    Plan const plan;
};

class TritonKernel final : public nvinfer1::IPluginV3,
                           public nvinfer1::IPluginV3OneCore,
                           public nvinfer1::IPluginV3OneBuildV2,
                           public nvinfer1::IPluginV3OneRuntime {
public:
    // building: no kernel is launched. A builder may time a plugin on arrays that hold anything, and
    // kernels read lengths and indices from arrays; there is but one way to run it anyway.
    TritonKernel(std::shared_ptr<Contents const> contents, int64_t workspace, bool building)
        : mContents(std::move(contents)), mWorkspace(workspace), mBuilding(building) {}

    nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override;
    nvinfer1::IPluginV3* clone() noexcept override;

    char const* getPluginName() const noexcept override { return kNAME; }
    char const* getPluginVersion() const noexcept override { return kVERSION; }
    char const* getPluginNamespace() const noexcept override { return kNAMESPACE; }

    int32_t getNbOutputs() const noexcept override;
    int32_t getOutputDataTypes(nvinfer1::DataType* types, int32_t outputs,
        nvinfer1::DataType const* inputTypes, int32_t inputs) const noexcept override;
    int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t inputCount,
        nvinfer1::DimsExprs const* shapeInputs, int32_t shapeInputCount, nvinfer1::DimsExprs* outputs,
        int32_t outputCount, nvinfer1::IExprBuilder& builder) noexcept override;
    bool supportsFormatCombination(int32_t position, nvinfer1::DynamicPluginTensorDesc const* described,
        int32_t inputs, int32_t outputs) noexcept override;
    int32_t configurePlugin(nvinfer1::DynamicPluginTensorDesc const* in, int32_t inputs,
        nvinfer1::DynamicPluginTensorDesc const* out, int32_t outputs) noexcept override;
    std::size_t getWorkspaceSize(nvinfer1::DynamicPluginTensorDesc const* in, int32_t inputs,
        nvinfer1::DynamicPluginTensorDesc const* out, int32_t outputs) const noexcept override;
    int32_t getAliasedInput(int32_t output) noexcept override;

    int32_t onShapeChange(nvinfer1::PluginTensorDesc const* in, int32_t inputs,
        nvinfer1::PluginTensorDesc const* out, int32_t outputs) noexcept override;
    int32_t enqueue(nvinfer1::PluginTensorDesc const* inputDesc, nvinfer1::PluginTensorDesc const* outputDesc,
        void const* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream) noexcept override;
    nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext* context) noexcept override;
    nvinfer1::PluginFieldCollection const* getFieldsToSerialize() noexcept override;

private:
    void prepare(Shapes const& shapes);
    void launch(Launch const& launch, std::size_t number, void const* const* inputs,
        std::vector<void*> const& outputs, char* workspace, cudaStream_t stream);

    std::shared_ptr<Contents const> mContents;
    int64_t mWorkspace;
    bool mBuilding;
    // The last call's shapes and what they resolve to.
    Shapes mShapes;
    Call mCall;
    bool mReady{false};
    int mCapability{0};
    std::vector<nvinfer1::PluginField> mFields;
    nvinfer1::PluginFieldCollection mCollection{};
};

class Creator final : public nvinfer1::IPluginCreatorV3One {
public:
    Creator();
    nvinfer1::IPluginV3* createPlugin(char const* name, nvinfer1::PluginFieldCollection const* fields,
        nvinfer1::TensorRTPhase phase) noexcept override;
    nvinfer1::PluginFieldCollection const* getFieldNames() noexcept override { return &mCollection; }
    char const* getPluginName() const noexcept override { return kNAME; }
    char const* getPluginVersion() const noexcept override { return kVERSION; }
    char const* getPluginNamespace() const noexcept override { return kNAMESPACE; }

private:
    std::vector<nvinfer1::PluginField> mFields;
    nvinfer1::PluginFieldCollection mCollection{};
};

}  // namespace clover
