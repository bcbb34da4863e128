#include "expression.h"

#include <NvInferRuntime.h>

#include <algorithm>
#include <limits>

namespace clover {

namespace {

using Kind = Expression::Kind;
constexpr int kDEPTH = 64;

bool isLetter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }
bool isDigit(char c) { return c >= '0' && c <= '9'; }

class Parser {
public:
    explicit Parser(std::string const& text) : mText(text) { advance(); }

    Expression guard() {
        Expression made = comparison();
        if (mToken == "and") {
            Expression all{Kind::both, 0, "", {std::move(made)}};
            while (take("and")) all.parts.push_back(comparison());
            made = std::move(all);
        }
        if (!mToken.empty()) fail("'" + mToken + "' is not part of the grammar");
        return made;
    }

private:
    [[noreturn]] void fail(std::string const& why) const {
        throw Fault("expression '" + mText + "': " + why);
    }

    void advance() {
        while (mAt < mText.size() && mText[mAt] == ' ') ++mAt;
        std::size_t const start = mAt;
        if (mAt == mText.size()) {
            mToken.clear();
            return;
        }
        char const first = mText[mAt++];
        if (isLetter(first)) {
            while (mAt < mText.size() && (isLetter(mText[mAt]) || isDigit(mText[mAt]))) ++mAt;
        } else if (isDigit(first)) {
            while (mAt < mText.size() && isDigit(mText[mAt])) ++mAt;
            if (mAt < mText.size() && isLetter(mText[mAt])) fail("a number runs into a name");
        } else if (mAt < mText.size()
            && (mText.compare(start, 2, "//") == 0 || mText.compare(start, 2, "<=") == 0
                || mText.compare(start, 2, ">=") == 0 || mText.compare(start, 2, "==") == 0)) {
            ++mAt;
        } else if (std::string("-+*(),<>").find(first) == std::string::npos) {
            fail("it holds something that is no name, decimal number or operator");
        }
        mToken = mText.substr(start, mAt - start);
    }

    bool take(char const* token) {
        if (mToken != token) return false;
        advance();
        return true;
    }

    Expression binary(Kind kind, Expression left, Expression right) const {
        return Expression{kind, 0, "", {std::move(left), std::move(right)}};
    }

    Expression comparison() {
        static std::map<std::string, Kind> const kOPERATORS{{"<=", Kind::le}, {"<", Kind::lt},
            {">=", Kind::ge}, {">", Kind::gt}, {"==", Kind::eq}};
        Expression left = sum(0);
        auto const found = kOPERATORS.find(mToken);
        if (found == kOPERATORS.end()) return left;
        advance();
        return binary(found->second, std::move(left), sum(0));
    }

    Expression sum(int depth) {
        Expression made = product(depth);
        while (mToken == "+" || mToken == "-") {
            Kind const kind = mToken == "+" ? Kind::add : Kind::sub;
            advance();
            made = binary(kind, std::move(made), product(depth));
        }
        return made;
    }

    Expression product(int depth) {
        Expression made = atom(depth);
        while (mToken == "*" || mToken == "//") {
            Kind const kind = mToken == "*" ? Kind::mul : Kind::div;
            advance();
            made = binary(kind, std::move(made), atom(depth));
        }
        return made;
    }

    Expression atom(int depth) {
        if (depth > kDEPTH) fail("it is nested too deeply");
        if (take("(")) {
            Expression made = sum(depth + 1);
            if (!take(")")) fail("')' is missing");
            return made;
        }
        if (mToken.empty()) fail("it ends early");
        std::string const token = mToken;
        if (isDigit(token[0])) return literal(token);
        if (!isLetter(token[0]) || token == "and" || token == "or" || token == "not")
            fail("'" + token + "' is not part of the grammar");
        advance();
        if (mToken != "(") return Expression{Kind::name, 0, token, {}};
        return call(token, depth);
    }

    Expression literal(std::string const& token) {
        int64_t value = 0;
        for (char const c : token) {
            if (__builtin_mul_overflow(value, int64_t{10}, &value)
                || __builtin_add_overflow(value, int64_t{c - '0'}, &value))
                fail("a value leaves 64 bits");
        }
        if (token.size() > 1 && token[0] == '0' && value != 0) fail("a number starts with 0");
        advance();
        return Expression{Kind::number, value, "", {}};
    }

    Expression call(std::string const& function, int depth) {
        static std::map<std::string, Kind> const kCALLS{
            {"cdiv", Kind::cdiv}, {"min", Kind::min}, {"max", Kind::max}};
        auto const found = kCALLS.find(function);
        if (found == kCALLS.end()) fail("'" + function + "(' is not part of the grammar");
        advance();
        Expression left = sum(depth + 1);
        if (!take(",")) fail("',' is missing");
        Expression right = sum(depth + 1);
        if (!take(")")) fail("')' is missing");
        return binary(found->second, std::move(left), std::move(right));
    }

    std::string const& mText;
    std::size_t mAt{0};
    std::string mToken;
};

int64_t quotient(int64_t a, int64_t b, bool up) {
    if (b <= 0) throw Fault("divisor " + std::to_string(b) + " is not positive");
    int64_t const whole = a / b, rest = a % b;
    if (up) return whole + (rest > 0);
    return whole - (rest < 0);
}

int64_t apply(Kind kind, int64_t a, int64_t b) {
    int64_t made = 0;
    bool overflows = false;
    switch (kind) {
    case Kind::add: overflows = __builtin_add_overflow(a, b, &made); break;
    case Kind::sub: overflows = __builtin_sub_overflow(a, b, &made); break;
    case Kind::mul: overflows = __builtin_mul_overflow(a, b, &made); break;
    case Kind::div: return quotient(a, b, false);
    case Kind::cdiv: return quotient(a, b, true);
    case Kind::min: return std::min(a, b);
    case Kind::max: return std::max(a, b);
    case Kind::le: return a <= b;
    case Kind::lt: return a < b;
    case Kind::ge: return a >= b;
    case Kind::gt: return a > b;
    case Kind::eq: return a == b;
    default: throw Fault("an operator without meaning");
    }
    if (overflows) throw Fault("a value leaves 64 bits");
    return made;
}

}  // namespace

Expression Expression::of(Json const& size) {
    if (size.isInteger()) return Expression{Kind::number, size.integer(), "", {}};
    return parse(size.string());
}

Expression Expression::parse(std::string const& text) { return Parser(text).guard(); }

int64_t Expression::evaluate(Symbols const& symbols) const {
    if (kind == Kind::number) return number;
    if (kind == Kind::name) {
        auto const found = symbols.find(name);
        if (found == symbols.end()) throw Fault(name + " has no value");
        return found->second;
    }
    if (kind == Kind::both) {
        bool all = true;
        for (auto const& part : parts) all = part.evaluate(symbols) != 0 && all;
        return all;
    }
    return apply(kind, parts[0].evaluate(symbols), parts[1].evaluate(symbols));
}

nvinfer1::IDimensionExpr const* Expression::build(
    Dimensions const& symbols, nvinfer1::IExprBuilder& builder) const {
    using nvinfer1::DimensionOperation;
    static std::map<Kind, DimensionOperation> const kOPERATIONS{
        {Kind::add, DimensionOperation::kSUM}, {Kind::sub, DimensionOperation::kSUB},
        {Kind::mul, DimensionOperation::kPROD}, {Kind::div, DimensionOperation::kFLOOR_DIV},
        {Kind::cdiv, DimensionOperation::kCEIL_DIV}, {Kind::min, DimensionOperation::kMIN},
        {Kind::max, DimensionOperation::kMAX}};
    if (kind == Kind::number) return builder.constant(number);
    if (kind == Kind::name) {
        auto const found = symbols.find(name);
        return found == symbols.end() ? nullptr : found->second;
    }
    auto const operation = kOPERATIONS.find(kind);
    if (operation == kOPERATIONS.end()) return nullptr;
    auto const* left = parts[0].build(symbols, builder);
    auto const* right = parts[1].build(symbols, builder);
    if (left == nullptr || right == nullptr) return nullptr;
    return builder.operation(operation->second, *left, *right);
}

void Expression::names(std::set<std::string>& found) const {
    if (kind == Kind::name) found.insert(name);
    for (auto const& part : parts) part.names(found);
}

}  // namespace clover
