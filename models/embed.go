package models

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	openai "github.com/sashabaranov/go-openai"
)

// Embed returns the vector of each text, in order. It makes one attempt; the caller may retry. Its error is an
// *[Error] or wraps the context's error. Extra and ModelInfo do not apply.
func (c *Client) Embed(ctx context.Context, texts []string) ([][]float32, error) {
	request := openai.EmbeddingRequest{
		Input: texts, Model: openai.EmbeddingModel(c.config.Model),
		EncodingFormat: openai.EmbeddingEncodingFormatFloat,
	}
	body, err := json.Marshal(request)
	if err != nil {
		return nil, &Error{Message: "encode request: " + err.Error(), cause: err}
	}
	attemptCtx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	trip := newRoundTrip(c.config, "", string(body), cancel)
	defer trip.close()
	_, err = c.openAIClient(trip).CreateEmbeddings(attemptCtx, request)
	if err == nil && trip.failure == nil {
		vectors, err := readEmbeddings(trip.document, len(texts))
		if err != nil {
			return nil, (&Error{Message: err.Error(), cause: err}).scrubbed(c.config.secrets())
		}
		return vectors, nil
	}
	if ctx.Err() != nil {
		return nil, contextError(ctx)
	}
	failure := trip.toError(attemptCtx, err)
	if failure.operatorAdvice() != "" {
		failure.Advice = "check AGENT_EMBEDDING_MODEL, AGENT_EMBEDDING_BASE_URL and AGENT_EMBEDDING_KEY"
	}
	return nil, failure
}

// readEmbeddings decodes OpenAI's response. Servers may list the vectors in any order.
func readEmbeddings(document []byte, texts int) ([][]float32, error) {
	var answer openai.EmbeddingResponse
	if err := json.Unmarshal(document, &answer); err != nil {
		return nil, fmt.Errorf("decode embeddings: %s", strings.TrimPrefix(err.Error(), "json: "))
	}
	if len(answer.Data) != texts {
		return nil, fmt.Errorf("the server sent %d embeddings of %d texts: "+
			"is this the base URL of an embeddings endpoint?",
			len(answer.Data), texts)
	}
	vectors := make([][]float32, texts)
	for _, e := range answer.Data {
		if e.Index < 0 || e.Index >= texts {
			return nil, fmt.Errorf("the server sent an embedding for index %d, of %d texts", e.Index, texts)
		}
		if vectors[e.Index] != nil || len(e.Embedding) == 0 {
			return nil, fmt.Errorf("the server sent an empty or a second embedding for index %d", e.Index)
		}
		vectors[e.Index] = e.Embedding
	}
	return vectors, nil
}
