package reason

import (
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/lanekeeper/lanekeeper/internal/schema"
	"github.com/lanekeeper/lanekeeper/models"
)

// Form is the JSON that a turn's answer must be. The schema is sent with each request of the turn, and the loop
// validates the answer. One that does not fit is corrected once; then the turn ends as EndedForm.
type Form struct {
	Name        string `json:"name,omitempty"`
	Description string `json:"description,omitempty"`
	// Schema is the text of a JSON Schema, in the order of its members; empty for any object.
	Schema string `json:"schema,omitempty"`
	Strict bool   `json:"strict,omitempty"`
}

// Bounds of a form, which strangers send. Compiling a schema takes the cube of its depth.
const (
	mostSchema      = 64 << 10
	deepestForm     = 64
	mostChecks      = 200_000 // of a schema's parts against one answer
	mostViolations  = 1_000   // bytes of what a correction says
	checksURL       = "form:checks"
	whyOtherwise    = "the answer did not have the form that was asked for"
	formCorrection  = "Your answer does not have the form that was asked for: %s. Answer again, with that JSON alone."
	formCutOff      = "the answer was cut off at its limit of tokens"
	formFiltered    = "the model's provider withheld the answer"
	formNotAnswered = "the model declined: %s"
)

var formName = regexp.MustCompile(`^[a-zA-Z0-9_-]{1,64}$`)

// errCostly ends the validation of an answer by a schema that multiplies itself.
var errCostly = errors.New("the schema takes too long to check")

// Check returns what is wrong with the form itself.
func (f Form) Check() error {
	if f.Schema == "" {
		return nil
	}
	if !formName.MatchString(f.Name) {
		return errors.New("its name must be 1 to 64 letters, digits, _ and -")
	}
	_, err := f.compile()
	return err
}

// compile reads the schema.
func (f Form) compile() (*jsonschema.Schema, error) {
	if len(f.Schema) > mostSchema {
		return nil, fmt.Errorf("it has more than %d bytes", mostSchema)
	}
	if schema.Depth([]byte(f.Schema), deepestForm) > deepestForm {
		return nil, fmt.Errorf("it is nested more than %d levels deep", deepestForm)
	}
	var doc any
	if err := json.Unmarshal([]byte(f.Schema), &doc); err != nil {
		return nil, fmt.Errorf("it is not JSON: %w", err)
	}
	if _, ok := doc.(map[string]any); !ok {
		return nil, errors.New("it is no object")
	}
	compiled, err := schema.Compile([]byte(f.Schema), countChecks)
	if err != nil {
		return nil, errors.New(clipped(schema.OneLine(err)))
	}
	return compiled, nil
}

// countChecks bounds how many parts of a schema the compiled schema checks.
func countChecks(c *jsonschema.Compiler) {
	checks := new(checkCounter)
	c.RegisterVocabulary(&jsonschema.Vocabulary{
		URL: checksURL,
		Compile: func(*jsonschema.CompilerContext, map[string]any) (jsonschema.SchemaExt, error) {
			return checks, nil
		},
	})
	c.AssertVocabs()
}

// checkCounter bounds how many parts of a schema are checked. References can double the work at each level.
type checkCounter int

// Validate counts, and panics with errCostly when it was too much.
func (c *checkCounter) Validate(*jsonschema.ValidatorContext, any) {
	if *c++; *c > mostChecks {
		panic(errCostly)
	}
}

// read returns the answer's JSON, without the fence that models like to put around it, or what is wrong with it.
func (f Form) read(text string) (answer, wrong string) {
	answer = unfenced(text)
	value, err := jsonschema.UnmarshalJSON(strings.NewReader(answer))
	if err != nil {
		return answer, "it is not JSON alone: " + clipped(err.Error())
	}
	if f.Schema == "" {
		if _, ok := value.(map[string]any); !ok {
			return answer, "it is not a JSON object"
		}
		return answer, ""
	}
	compiled, err := f.compile()
	if err == nil {
		err = validate(compiled, value)
	}
	if err != nil {
		return answer, clipped(schema.OneLine(err))
	}
	return answer, ""
}

// validate checks a value, for as long as that is reasonable.
func validate(compiled *jsonschema.Schema, value any) (err error) {
	defer func() {
		switch p := recover(); {
		case p == nil:
		case p == any(errCostly):
			err = errCostly
		default:
			panic(p)
		}
	}()
	return compiled.Validate(value)
}

// unfenced is a text without one code fence around all of it.
func unfenced(text string) string {
	text = strings.TrimSpace(text)
	inner, opened := strings.CutPrefix(text, "```")
	inner, closed := strings.CutSuffix(inner, "```")
	if !opened || !closed {
		return text
	}
	return strings.TrimSpace(strings.TrimPrefix(inner, "json"))
}

// clipped bounds a text that repeats what a client or a model has written.
func clipped(text string) string {
	if len(text) <= mostViolations {
		return text
	}
	return text[:runeStart(text, mostViolations)] + "…"
}

// schema is the form as a request has it; nil for an answer in words.
func (f *Form) schema() *models.Schema {
	if f == nil {
		return nil
	}
	return &models.Schema{
		Name: f.Name, Description: f.Description, Schema: json.RawMessage(f.Schema), Strict: f.Strict,
	}
}
