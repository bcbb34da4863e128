// Integer expressions of launch plans; the grammar stands in runtime/expressions.py, and
// tests/vectors/expressions.json holds what both evaluators must agree on.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "json.h"

namespace nvinfer1 {
class IDimensionExpr;
class IExprBuilder;
}  // namespace nvinfer1

namespace clover {

using Symbols = std::map<std::string, int64_t>;
using Dimensions = std::map<std::string, nvinfer1::IDimensionExpr const*>;

class Expression {
public:
    enum class Kind { number, name, add, sub, mul, div, cdiv, min, max, le, lt, ge, gt, eq, both };

    // A number or an expression, as plans hold them.
    static Expression of(Json const& size);
    static Expression parse(std::string const& text);

    int64_t evaluate(Symbols const& symbols) const;
    // The same as a dimension of the network; nullptr if the builder cannot express it.
    nvinfer1::IDimensionExpr const* build(
        Dimensions const& symbols, nvinfer1::IExprBuilder& builder) const;
    void names(std::set<std::string>& found) const;

    Kind kind{Kind::number};
    int64_t number{};
    std::string name;
    std::vector<Expression> parts;
};

}  // namespace clover
