// Two entries for tests: what this library makes of an expression, and of a call of a plan.
#include <cstring>
#include <sstream>

#include "plan.h"

#define CLOVER_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

int32_t answer(std::string const& words, char* text, int64_t room, int32_t status) {
    std::strncpy(text, words.c_str(), static_cast<std::size_t>(room - 1));
    text[room - 1] = 0;
    return static_cast<int64_t>(words.size()) < room ? status : 2;
}

template <typename List>
void list(std::ostringstream& out, List const& values) {
    char const* comma = "";
    out << "[";
    for (auto const& value : values) {
        out << comma << value;
        comma = ", ";
    }
    out << "]";
}

// What the kernel is handed, in order.
std::vector<std::string> arguments(clover::Launch const& launch, std::vector<int32_t> const& integers) {
    using Kind = clover::Argument::Kind;
    static std::map<Kind, std::string> const kNAMES{
        {Kind::input, "input"}, {Kind::output, "output"}, {Kind::scratch, "scratch"}};
    std::vector<std::string> made;
    std::size_t integer = 0;
    for (auto const& argument : launch.arguments) {
        bool const array = argument.kind != Kind::integer;
        made.push_back("[\"" + (array ? kNAMES.at(argument.kind) : "integer") + "\", "
            + (array ? std::to_string(argument.index) : std::to_string(integers[integer++])) + "]");
    }
    return made;
}

}  // namespace

// 0 and the value, or 1 and what is wrong as text.
CLOVER_EXPORT int32_t clover_evaluate(char const* expression, int32_t count, char const* const* names,
    int64_t const* values, int64_t* value, char* text, int64_t room) {
    try {
        clover::Symbols symbols;
        for (int32_t i = 0; i < count; ++i) symbols[names[i]] = values[i];
        *value = clover::Expression::parse(expression).evaluate(symbols);
        return 0;
    } catch (std::exception const& error) {
        return answer(error.what(), text, room, 1);
    }
}

// A call of a plan as JSON: variant, workspace and launches. `dims` holds the inputs' shapes one
// after the other, `ranks` their lengths. 0, or 1 and what is wrong, or 2 if there is no room.
CLOVER_EXPORT int32_t clover_resolve(char const* plan, int64_t planBytes, char const* cubins,
    int64_t cubinBytes, int32_t capability, int32_t const* ranks, int64_t const* dims, int32_t inputs,
    char* text, int64_t room) {
    try {
        clover::Plan const read({plan, static_cast<std::size_t>(planBytes)},
            {cubins, static_cast<std::size_t>(cubinBytes)});
        clover::Shapes shapes;
        for (int32_t i = 0; i < inputs; ++i) {
            shapes.emplace_back(dims, dims + ranks[i]);
            dims += ranks[i];
        }
        auto const& target = read.target(capability);
        auto const call = read.resolve(target, read.bind(shapes));
        std::ostringstream out;
        out << "{\"variant\": " << call.variant - target.variants.data()
            << ", \"workspace\": " << call.workspace << ", \"outputs\": ";
        list(out, call.outputBytes);
        out << ", \"launches\": [";
        for (std::size_t i = 0; i < call.grids.size(); ++i) {
            auto const& launch = call.variant->launches[i];
            out << (i > 0 ? ", " : "") << "{\"kernel\": " << launch.kernel << ", \"grid\": ";
            list(out, call.grids[i]);
            out << ", \"arguments\": ";
            list(out, arguments(launch, call.integers[i]));
            out << "}";
        }
        out << "]}";
        return answer(out.str(), text, room, 0);
    } catch (std::exception const& error) {
        return answer(error.what(), text, room, 1);
    }
}
